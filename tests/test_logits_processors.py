"""Bias, penalties and forbidden tokens: as transformers and OpenAI define them, with and without drafts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers_for_tests import byte_fallback, byte_level, kept, with_bos
from transformers_logits import transformers_logits

from hybridtrt.runtime.logits_processors import LogitsProcessors, make_processors, tokenizations
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.tokenizer import Tokenizer

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
FEW = st.integers(3, 5)  # so that bad words are met
SOME = st.lists(TOKENS, max_size=6) | st.lists(FEW, max_size=4)
STOPS = frozenset({1, 2})
WORDS = st.lists(FEW, min_size=1, max_size=3).map(tuple)
PROMPT_BEGINS = SamplingParams(bad_token_ids=((3, 4), (4, 3, 5), (9, 9, 9, 9)))
OPENAI = ("presence_penalty", "frequency_penalty")  # transformers does not have these


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    """Params of which each rule is off in about half of the examples.

    No end token is a bad word, which transformers would allow.
    """
    number = st.floats(-3, 3, width=16)
    rules: dict[str, st.SearchStrategy[Any]] = {
        "logit_bias": st.dictionaries(TOKENS, number, min_size=1, max_size=4).map(lambda bias: tuple(bias.items())),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 1.3, 7.0]),
        "presence_penalty": number,
        "frequency_penalty": number,
        "bad_token_ids": st.lists(WORDS, max_size=6).map(tuple),
        "min_tokens": st.integers(1, 8),
    }
    return SamplingParams(**{name: draw(values) for name, values in rules.items() if draw(st.booleans())})


def make(params: SamplingParams, prompt: list[int], output: list[int]) -> LogitsProcessors:
    made = make_processors(Request("x", tuple(prompt), params), STOPS, None, VOCAB) or LogitsProcessors(())
    for token in output:
        made.append(token)
    return made


def row(seed: int) -> NDArray[np.float32]:
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 3
    logits[seed % VOCAB] = -np.inf  # as the places of a padded vocabulary
    return logits


def openai(params: SamplingParams, output: list[int], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the tokens of the output."""
    changed = logits.astype(np.float64)
    for token, count in Counter(output).items():
        changed[token] -= count * params.frequency_penalty + params.presence_penalty
    return changed


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    params=sampling(),
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=SOME,
    drafts=SOME,
    seed=st.integers(0, 99),
)
@example(params=PROMPT_BEGINS, prompt=[4, 3], output=[], drafts=[], seed=0)
def test_rules_are_those_of_transformers_and_openai(
    params: SamplingParams, prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> None:
    """Penalties come last but for what is forbidden, so that those of OpenAI commute with the rest."""
    logits = row(seed)
    history = output + drafts
    theirs = transformers_logits(Request("x", tuple(prompt), params), STOPS, history, logits, sampled=False)
    ours = logits.copy()
    make(params, prompt, output).apply(ours, drafts)
    expected = openai(params, history, theirs)
    assert np.array_equal(np.isfinite(ours), np.isfinite(expected))
    finite = np.isfinite(ours)
    assert np.allclose(ours[finite], expected[finite], rtol=0, atol=1e-5)
    if not any(getattr(params, name) for name in OPENAI):
        assert np.array_equal(ours, theirs)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    params=sampling(),
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=SOME,
    drafts=SOME,
    seed=st.integers(0, 99),
)
def test_drafts_count_as_output_and_are_forgotten(
    params: SamplingParams, prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> None:
    guesses = make(params, prompt, output)
    before, ahead, after = row(seed), row(seed), row(seed)
    guesses.apply(before, [])
    guesses.apply(ahead, drafts)
    guesses.apply(after, [])
    appended = row(seed)
    make(params, prompt, output + drafts).apply(appended, [])
    assert np.array_equal(before, after)
    assert np.array_equal(ahead, appended)


def test_a_request_without_rules_has_no_processors() -> None:
    ends = frozenset({1})
    assert make_processors(Request("x", (1, 2)), ends, None, VOCAB) is None
    assert make_processors(Request("x", (1, 2), SamplingParams(min_tokens=3)), frozenset(), None, VOCAB) is None
    assert make_processors(Request("x", (1, 2), SamplingParams(min_tokens=3)), ends, None, VOCAB) is not None


def test_tokens_outside_the_vocabulary_are_not_looked_for() -> None:
    params = SamplingParams(min_tokens=2, bad_words=("fox", " "), bad_token_ids=((3,),))
    tokenizer = Tokenizer(kept(byte_level()))
    made = make_processors(Request("x", (1,), params), frozenset({-1, 2, VOCAB}), tokenizer, VOCAB)
    assert made is not None
    logits = np.zeros(VOCAB, np.float32)
    made.apply(logits, [])
    assert np.flatnonzero(logits).tolist() == [2, 3]


def test_bad_words_need_a_tokenizer() -> None:
    request = Request("x", (1,), SamplingParams(bad_words=("fox",)))
    with pytest.raises(ValueError, match=r"^bad_words=\('fox',\) need a tokenizer, and the engine has none$"):
        make_processors(request, frozenset(), None, VOCAB)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("word", ["fox", " fox", "lazy dog", "日本", "😀"])
@pytest.mark.parametrize("before", ["", "\t", " ", "\t "])
def test_bad_words_are_not_completed_wherever_they_stand(backend: Any, bos: bool, word: str, before: str) -> None:
    """Fed with the tokens of a text that has the word, the last of them is forbidden and none before it."""
    tokenizer = Tokenizer(kept(with_bos(backend()) if bos else backend()))
    made = make_processors(Request("x", (0,), SamplingParams(bad_words=(word,))), frozenset(), tokenizer, 420)
    assert made is not None
    allowed = []
    for token in tokenizer.encode(before + word.strip(), add_special_tokens=False):
        logits = np.zeros(420, np.float32)
        made.apply(logits, [])
        allowed.append(bool(logits[token] == 0))
        made.append(token)
    assert allowed == [True] * (len(allowed) - 1) + [False]


def test_a_space_is_a_word() -> None:
    tokenizer = Tokenizer(kept(byte_level()))
    assert tokenizations(" ", tokenizer) == {tokenizer.encode(" ")}
