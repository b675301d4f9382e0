"""Sampling: the definition row by row, its distribution, its seeds, and rows that do not know each other."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers_logits import transformers_logits

from hybridtrt.plugins.sample import SampleParams, native, reference, vectorized
from hybridtrt.plugins.sample.philox import philox, uniform
from hybridtrt.plugins.sample.reference import greedy, log_normalizer
from hybridtrt.runtime.answer import Answer
from hybridtrt.runtime.logits_processors import make_processors
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.sampler import choose, prompt_log_probs, temperature_of
from hybridtrt.runtime.sequence import Sequence

WALKERS = [reference, vectorized, native]


def make_params(
    rows: int, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0, seed: int = 0
) -> SampleParams:
    return SampleParams(
        temperature=np.full(rows, float(temperature)),
        top_k=np.full(rows, top_k),
        top_p=np.full(rows, float(top_p)),
        min_p=np.full(rows, float(min_p)),
        seeds=np.full(rows, seed, np.uint64),
        positions=np.arange(rows),
    )


def plain(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    """The definition for one row, in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    kept = ranked[: top_k or len(ranked)]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= min_p]
    target = number * sum(weights[token] for token in nucleus)
    for token in sorted(nucleus):
        target -= weights[token]
        if target < 0:
            return token
    raise AssertionError("nothing was chosen")


def draw(walker: ModuleType, logits: list[float], count: int, **limits: float) -> NDArray[np.int64]:
    """How often each token is drawn at `count` positions."""
    rows = np.tile(np.array(logits, np.float32), (count, 1))
    tokens = walker.sample(rows, make_params(count, **limits)).tokens
    return np.bincount(tokens, minlength=len(logits))


def test_philox_known_answers() -> None:
    """The vectors that are published with Random123 for philox4x32-10."""
    cases = [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        words = philox(*(tuple(np.array(numbers, np.uint64)[:, None]) for numbers in (counter, key)))
        assert [int(word[0]) for word in words] == expected


def test_uniform_numbers_are_even_and_differ_by_seed_and_position() -> None:
    numbers = uniform(np.full(20_000, 7, np.uint64), np.arange(20_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    assert chi_square(np.histogram(numbers, 20, (0, 1))[0], np.full(20, 0.05)) < 45  # 19 degrees, p = 0.0007
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    others = [uniform(np.array([seed], np.uint64), np.array([0]))[0] for seed in (7, 8, 7 + 2**32, 2**64 - 1)]
    assert len({numbers[0], *others}) == 4  # seed 7 twice


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("walker", WALKERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_row_follows_the_plain_definition(walker: ModuleType, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 17, 600]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = rng.standard_normal((4, size)).astype(np.float32) * 3
    if data.draw(st.booleans()):
        logits = np.round(logits)  # ties
    if data.draw(st.booleans()):
        logits[:, rng.random(size) < 0.5] = -np.inf
        logits[:, 0] = 0
    temperature = data.draw(st.sampled_from([0.1, 0.7, 1.0, 5.0]))
    top_k = data.draw(st.sampled_from([0, 1, 2, 5, 50, 10_000]))
    top_p = data.draw(st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]))
    min_p = data.draw(st.sampled_from([0.0, 0.013, 0.2, 1.0]))
    params = make_params(4, temperature, top_k, top_p, min_p, seed=data.draw(st.integers(0, 2**64 - 1)))
    tokens = walker.sample(logits, params).tokens
    numbers = uniform(params.seeds, params.positions)
    for row in range(4):
        assert tokens[row] == plain(logits[row].tolist(), temperature, top_k, top_p, min_p, numbers[row])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([50, 513, 1024, 9000]), ties=st.booleans())
def test_the_fast_form_chooses_as_the_definition_does(seed: int, size: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((32, size)).astype(np.float32) * 3
    params = SampleParams(
        temperature=rng.choice([0, 0.3, 1, 3.0], 32),
        top_k=rng.choice([0, 1, 2, 20, 40, 3000], 32),
        top_p=rng.choice([0, 0.1, 0.9, 0.999, 1], 32),
        min_p=rng.choice([0, 0, 0.01, 0.3, 1], 32),
        seeds=rng.integers(0, 2**63, 32).astype(np.uint64),
        positions=rng.integers(0, 10_000, 32),
    )
    logits = np.round(logits, 1) if ties else logits
    assert np.array_equal(vectorized.sample(logits, params).tokens, reference.sample(logits, params).tokens)


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"temperature": 2.0, "top_k": 3}, [0, 2, 5]),
        ({"top_p": 0.7}, [0, 2, 5]),
        ({"top_k": 3, "top_p": 0.7}, [2, 5]),  # of what top-k kept, two hold 0.7
        ({"temperature": 3.0, "top_p": 0.7}, [0, 1, 2, 5, 6]),  # the temperature comes first
        ({"min_p": 0.3}, [0, 1, 2, 5]),  # 0.09 is the least
        ({"temperature": 2.0, "min_p": 0.5}, [0, 1, 2, 5, 6]),
        ({"top_p": 0.7, "min_p": 0.6}, [2, 5]),  # the nucleus is that of all tokens
    ],
)
def test_distribution(walker: ModuleType, limits: dict[str, float], kept: list[int]) -> None:
    probabilities = np.array([0.16, 0.1, 0.3, 0.02, 0.04, 0.25, 0.08, 0.05])
    counts = draw(walker, np.log(probabilities).tolist(), 20_000, **limits)
    weights = np.zeros(8)
    weights[kept] = probabilities[kept] ** (1 / limits.get("temperature", 1))
    assert chi_square(counts, weights / weights.sum()) < 25  # at most 7 degrees, p = 0.0008


@pytest.mark.parametrize("walker", WALKERS)
def test_temperature_tends_to_greedy_and_to_even(walker: ModuleType) -> None:
    logits = [1.0, 1.5, 1.4, 0.0]
    for temperature in (1e-3, 1e-30, 1e-300):
        assert draw(walker, logits, 100, temperature=temperature).tolist() == [0, 100, 0, 0]
    counts = draw(walker, logits, 10_000, temperature=1e6)
    assert chi_square(counts, np.full(4, 0.25)) < 17


@pytest.mark.parametrize("walker", WALKERS)
def test_no_temperature_allows_what_is_forbidden(walker: ModuleType) -> None:
    logits = [-np.inf, 1.0, -np.inf, 1.5, -np.inf]
    for temperature in (1e-300, 1e38, 1e39, 1e300):
        assert draw(walker, logits, 100, temperature=temperature)[::2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("walker", WALKERS)
def test_rows_do_not_depend_on_each_other(walker: ModuleType) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 300)).astype(np.float32)
    fields = {
        "temperature": rng.choice([0, 0.5, 1.0], 40),
        "top_k": rng.choice([0, 5], 40),
        "top_p": rng.choice([0.8, 1], 40),
        "min_p": rng.choice([0, 0.2], 40),
        "seeds": rng.integers(0, 2**63, 40).astype(np.uint64),
        "positions": rng.integers(0, 1000, 40),
    }
    together = walker.sample(logits, SampleParams(**fields)).tokens
    order = rng.permutation(40)
    shuffled = walker.sample(logits[order], SampleParams(**{name: value[order] for name, value in fields.items()}))
    assert np.array_equal(shuffled.tokens, together[order])
    for row in range(40):
        alone = SampleParams(**{name: value[row : row + 1] for name, value in fields.items()})
        assert walker.sample(logits[row : row + 1], alone).tokens[0] == together[row]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([[0, 2, 2, 1], [3, 3, 3, 3], [-np.inf, -5, -np.inf, -5]], np.float32)
    assert greedy(logits).tokens.tolist() == [1, 0, 1]


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("bad", [[0, np.nan, 1], [np.nan] * 3, [-np.inf] * 3, [0, np.inf, 1]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_finite_maximum_is_reported_and_the_others_are_not(
    walker: ModuleType, bad: list[float], temperature: float
) -> None:
    logits = np.array([[0, 0, 9], bad, [9, 0, 0]], np.float32)
    result = walker.sample(logits, make_params(3, temperature, top_p=0.5))
    assert result.valid.tolist() == [True, False, True]
    assert result.tokens[[0, 2]].tolist() == [2, 0]


def test_log_normalizer() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32) * 10
    expected = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), 1).numpy()
    for row in range(5):
        assert np.abs(logits[row] - log_normalizer(logits[row]) - expected[row]).max() < 1e-5
    assert log_normalizer(np.array([-np.inf, 500, 500, -500], np.float32)) == 500 + math.log(2)
    for bad in (np.nan, np.inf):
        assert math.isnan(log_normalizer(np.array([0, bad, 1], np.float32)))


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({}, 0),
        ({"temperature": 0.0, "top_k": 5}, 0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "top_k": 1}, 0),
        ({"temperature": 0.7, "top_p": 0.0}, 0),
        ({"top_k": 0, "top_p": 1.0}, 0),
        ({"top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
        ({"min_p": 0.1}, 1),
        ({"min_p": 0.0}, 0),
        ({"temperature": 0.0, "min_p": 0.1}, 0),
    ],
)
def test_what_is_greedy(params: dict[str, float], temperature: float) -> None:
    assert temperature_of(SamplingParams(**params)) == temperature


def make_sequence(params: SamplingParams, prompt: tuple[int, ...] = (1, 2), **state: Any) -> Sequence:
    request = Request("x", prompt, params)
    return Sequence(
        request,
        np.array(prompt, np.int32),
        Answer(request, 0, None),
        seed=params.seed or 0,
        greedy=temperature_of(params) == 0,
        processors=make_processors(request, STOPS, None, VOCAB),
        **state,
    )


VOCAB = 100
STOPS = frozenset({0, 1})
KINDS = [
    SamplingParams(return_log_probs=True),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(top_k=3, seed=2**64 - 1, return_log_probs=True),
    SamplingParams(repetition_penalty=1.5, logit_bias=((3, 1.0), (4, -5.0)), top_log_probs=4, min_tokens=3),
    SamplingParams(min_p=0.1, seed=7, presence_penalty=2.0, frequency_penalty=0.5, bad_token_ids=((3,), (5, 6))),
]


def random_logits(seed: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * 2


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """A bit for each token: bit t % 32 of word t // 32, by the definition."""
    words = np.zeros(-(-len(allowed) // 32), np.uint32)
    for token in np.flatnonzero(allowed):
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def test_a_batch_mixes_all_kinds_of_rows() -> None:
    rng = np.random.default_rng(3)
    logits = random_logits(3, 10)
    sequences = [make_sequence(kind, drafts=[5, 5, 6, 9]) for kind in KINDS * 2]
    ahead = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    masks = [packed(rng.random(VOCAB) < 0.1) if row % 3 == 0 else None for row in range(10)]
    logits[5, 3] = np.nan
    given = logits.copy()
    together = choose(given, sequences, ahead, masks, [i for i in range(10) if not sequences[i].plain])
    assert np.array_equal(given, logits, equal_nan=True)
    assert together.valid == [row != 5 for row in range(10)]
    for row in range(10):
        alone = choose(logits[row : row + 1].copy(), [sequences[row]], [ahead[row]], [masks[row]])
        assert (alone.tokens[0], alone.valid[0]) == (together.tokens[row], together.valid[row]) or row == 5
        assert np.array_equal(alone.log_probs[0], together.log_probs[row], equal_nan=True)
        assert alone.top[0] == together.top[row]
        asked = KINDS[row % 5].return_log_probs or KINDS[row % 5].top_log_probs > 0
        assert math.isnan(together.log_probs[row]) == (not asked or row == 5)
        assert len(together.top[row]) == KINDS[row % 5].top_log_probs
        if masks[row] is not None:
            assert masks[row][together.tokens[row] // 32] >> np.uint32(together.tokens[row] % 32) & np.uint32(1)
    assert choose(logits[:1].copy(), sequences[:1], [0], None).tokens == [logits[0].argmax()]


def test_the_seed_and_the_place_decide() -> None:
    logits = random_logits(0, 1)
    kind = KINDS[1]
    seeds = {choose(logits, [make_sequence(replace(kind, seed=seed))], [0], None).tokens[0] for seed in range(20)}
    places = {choose(logits, [make_sequence(kind, drafts=[9] * 20)], [i], None).tokens[0] for i in range(20)}
    assert len(seeds) > 3
    assert len(places) > 3


@settings(max_examples=100, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), drafts=st.lists(st.integers(0, 9), max_size=5), seed=st.integers(0, 1000))
def test_rows_ahead_choose_what_a_sequence_with_these_tokens_would(
    kind: SamplingParams, drafts: list[int], seed: int
) -> None:
    logits = random_logits(seed, len(drafts) + 1)
    sequence = make_sequence(kind, drafts=drafts)
    rows = range(len(drafts) + 1)
    together = choose(logits.copy(), [sequence] * len(rows), list(rows), None)
    for row in rows:
        sure = make_sequence(kind)
        for token in drafts[:row]:
            sure.append(token, 0.0, (), True)
        alone = choose(logits[row : row + 1].copy(), [sure], [0], None)
        assert alone.tokens[0] == together.tokens[row]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_whole_order_is_that_of_transformers(data: st.DataObject) -> None:
    """The token is where the cumulative probability under transformers' logits passes the row's number."""
    choices: dict[str, list[Any]] = {
        "temperature": [0.3, 0.9, 2.0],
        "top_k": [2, 7, 50],
        "top_p": [0.2, 0.8, 0.99],
        "min_p": [0.01, 0.1, 0.6],
        "repetition_penalty": [0.8, 1.4],
        "logit_bias": [((3, 4.0), (11, -2.0))],
        "bad_token_ids": [((2,), (5, 6), (7, 5, 8))],
        "min_tokens": [3],
    }
    values = {name: data.draw(st.sampled_from(some)) for name, some in choices.items() if data.draw(st.booleans())}
    params = SamplingParams(seed=data.draw(st.integers(0, 2**64 - 1)), **values)
    prompt = tuple(data.draw(st.lists(st.integers(2, 12), min_size=1, max_size=5)))
    drafts = data.draw(st.lists(st.integers(2, 12), max_size=5))
    sequence = make_sequence(params, prompt, drafts=drafts)
    logits = random_logits(data.draw(st.integers(0, 1000)), 1)
    theirs = transformers_logits(sequence.request, STOPS, drafts, logits[0], sampled=not sequence.greedy)
    chosen = choose(logits, [sequence], [len(drafts)], None).tokens[0]
    if sequence.greedy:
        assert chosen == theirs.argmax()
    else:
        cumulative = np.cumsum(np.exp(theirs.astype(np.float64) - theirs.max()))
        number = uniform(np.array([params.seed], np.uint64), np.array([len(prompt) + len(drafts)]))[0]
        assert chosen == np.searchsorted(cumulative, number * cumulative[-1], side="right")


def test_log_probs_and_the_best_tokens_are_those_before_any_change() -> None:
    logits = random_logits(1, 1)
    banned = int(logits[0].argmax())
    kind = SamplingParams(top_log_probs=3, return_log_probs=True, bad_token_ids=((banned,),), temperature=0.5, seed=1)
    expected = torch.log_softmax(torch.from_numpy(logits[0].astype(np.float64)), 0)
    choice = choose(logits.copy(), [make_sequence(kind)], [0], [packed(np.arange(VOCAB) % 2 == 1)])
    assert choice.tokens[0] != banned
    assert choice.log_probs[0] == pytest.approx(float(expected[choice.tokens[0]]), abs=1e-5)
    best = torch.topk(expected, 3)
    assert [token for token, _ in choice.top[0]] == best.indices.tolist()
    assert [value for _, value in choice.top[0]] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("size", [5, 100, 5000])
def test_log_probs_of_a_prompt(size: int) -> None:
    logits = np.random.default_rng(2).standard_normal((4, size)).astype(np.float32) * 5
    logits[3, 1] = np.nan
    tokens = np.array([4, 0, 3, 2])
    expected = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), 1)
    given = prompt_log_probs(logits, tokens, 6)
    for row in range(3):
        best = torch.topk(expected[row], min(6, size))
        assert given[row][0] == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        assert [token for token, _ in given[row][1]] == best.indices.tolist()
        assert [value for _, value in given[row][1]] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert math.isnan(given[3][0])
    assert given[3][1] == ()
    assert [top for _, top in prompt_log_probs(logits[:3], tokens[:3], 0)] == [(), (), ()]


def test_equal_logits_rank_by_id() -> None:
    assert [token for token, _ in prompt_log_probs(np.ones((1, 5000), np.float32), [7], 3)[0][1]] == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_is_invalid_when_nothing_is_allowed_or_the_model_failed_where_something_is_not(
    temperature: float,
) -> None:
    logits = random_logits(4, 4)
    logits[1, 3] = np.nan
    none, all_but_3 = packed(np.zeros(VOCAB, bool)), packed(np.arange(VOCAB) != 3)
    sequences = [make_sequence(SamplingParams(temperature=temperature, top_log_probs=1))] * 4
    choice = choose(logits, sequences, [0] * 4, [None, all_but_3, none, all_but_3])
    assert choice.valid == [True, False, False, True]
    assert [len(top) for top in choice.top] == [1, 0, 0, 1]


def test_numbers_of_any_size_are_legal() -> None:
    """A request's numbers cannot make a step fail for the others."""
    kinds = [
        SamplingParams(top_k=10**30, temperature=1e300, seed=0),
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(presence_penalty=1e300, frequency_penalty=-1e300),
        SamplingParams(logit_bias=((3, 1e300), (4, -1e300))),
        SamplingParams(),
    ]
    with np.errstate(all="ignore"):
        choice = choose(random_logits(5, 5), [make_sequence(kind, drafts=[3]) for kind in kinds], [1] * 5, None)
    assert choice.valid[0]
    assert choice.valid[4]
