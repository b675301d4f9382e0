"""Streamed text: nothing lost, doubled, broken or leaked, wherever prompts, tokens and pieces are cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CORPUS, byte_fallback, byte_level, token_bytes

from hybridtrt.runtime.detokenizer import BROKEN, Detokenizer
from hybridtrt.runtime.stop_words import StopWords

TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
SPECIAL_IDS = {name: frozenset(map(backend.token_to_id, ("<s>", "</s>"))) for name, backend in TOKENIZERS.items()}

texts = st.lists(
    st.one_of(
        st.sampled_from(
            [*"ab .,'\n\t", "  ", "é", "日本", "你好", "😀", "👩‍👩‍👧", "🇩🇪", "\u0301", "\x00", "the quick ", " 😀"]
        ),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=3),
    ),
    max_size=12,
).map("".join)
kinds = st.sampled_from(sorted(TOKENIZERS))


def stream(kind: str, ids: Sequence[int], prompt_length: int) -> tuple[list[str], str]:
    """The pieces that come out, and what is flushed at the end."""
    detokenizer = Detokenizer(TOKENIZERS[kind].decode, ids[:prompt_length], SPECIAL_IDS[kind])
    pieces = [detokenizer.push(token) for token in ids[prompt_length:]]
    return pieces, detokenizer.flush()


def test_tokens_of_the_byte_level_tokenizer_end_inside_characters() -> None:
    tokens = TOKENIZERS["byte_level"].encode("日本 😀").tokens
    assert any(token_bytes(TOKENIZERS["byte_level"], token).decode(errors="replace")[-1] == BROKEN for token in tokens)
    assert "<0xE6>" in TOKENIZERS["byte_fallback"].encode("日").tokens


@settings(max_examples=300, deadline=None)
@given(kind=kinds, text=texts, cut=st.integers(0, 100))
@example(kind="byte_level", text="x 😀y", cut=2)
@example(kind="byte_level", text="日本", cut=2)
@example(kind="byte_fallback", text="你好", cut=6)
def test_pieces_join_to_the_text_without_the_prompt(kind: str, text: str, cut: int) -> None:
    backend = TOKENIZERS[kind]
    encoding = backend.encode(text)
    cut = min(cut, len(encoding.ids))
    pieces, rest = stream(kind, encoding.ids, cut)
    prompt = b"".join(token_bytes(backend, token) for token in encoding.tokens[:cut])
    whole = b"".join(token_bytes(backend, token) for token in encoding.tokens)
    assert whole.decode().removeprefix(" " if kind == "byte_fallback" else "") == backend.decode(encoding.ids) == text
    complete = len(prompt.decode(errors="ignore"))  # the character in which the prompt ends comes with the output
    stripped = kind == "byte_fallback" and cut == 0
    assert "".join(pieces) == whole.decode()[complete + stripped :]
    assert rest == ""
    assert not any(BROKEN in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(prompt=texts, seed=st.integers(0, 10_000), count=st.integers(1, 60))
def test_random_tokens_join_to_the_decoded_whole(prompt: str, seed: int, count: int) -> None:
    backend = TOKENIZERS["byte_level"]
    ids = backend.encode(prompt).ids
    start = len(ids)
    ids += random.Random(seed).choices(range(backend.get_vocab_size()), k=count)
    pieces, rest = stream("byte_level", ids, start)
    assert prompt + "".join(pieces) + rest == backend.decode(ids)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 80), prompt_length=st.integers(0, 20))
def test_bytes_in_disorder_do_not_hurt_the_words_around_them(seed: int, count: int, prompt_length: int) -> None:
    backend = TOKENIZERS["byte_fallback"]
    words = backend.encode(CORPUS[0]).ids
    high = [backend.token_to_id(f"<0x{byte:02X}>") for byte in (0x80, 0x9F, 0xA0, 0xBD, 0xC3, 0xE4, 0xF0, 0xFF)]
    ids = backend.encode("x").ids + random.Random(seed).choices(words + high * 8, k=count + prompt_length)
    prompt_length += 2
    pieces, rest = stream("byte_fallback", ids, prompt_length)
    words_only = [token for token in ids if token not in high]
    behind = len(backend.decode([token for token in ids[:prompt_length] if token not in high]))
    shown = "".join(char for char in "".join(pieces) + rest if char < "\x80")
    assert shown == backend.decode(words_only)[behind:]


def test_a_whole_run_of_bytes_that_ends_broken_does_not_take_back_what_was_shown() -> None:
    backend = TOKENIZERS["byte_fallback"]
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xe4"] + backend.encode("a").ids[1:]
    assert backend.decode(ids) == BROKEN * 4 + "a"
    pieces, rest = stream("byte_fallback", ids, 0)
    assert ("".join(pieces), rest) == ("你" + BROKEN + "a", "")


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_an_incomplete_end_is_flushed_as_the_tokenizer_decodes_it(kind: str) -> None:
    backend = TOKENIZERS[kind]
    ids = backend.encode("ab 😀").ids[:-1]
    pieces, rest = stream(kind, ids, 1)
    assert BROKEN not in "".join(pieces)
    assert rest.strip(BROKEN) == ""
    assert backend.decode(ids[:1]) + "".join(pieces) + rest == backend.decode(ids)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_a_replacement_character_in_the_prompt_is_not_repeated(kind: str) -> None:
    backend = TOKENIZERS[kind]
    prompt = backend.encode("ab" + BROKEN).ids
    pieces, rest = stream(kind, prompt + backend.encode("c").ids[-1:], len(prompt))
    assert "".join(pieces) + rest == "c"


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_special_tokens_have_no_text_and_keep_the_spaces_around_them(kind: str) -> None:
    backend = TOKENIZERS[kind]
    bos, eos = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    prompt = [bos, *backend.encode("one").ids, eos]
    answer = backend.encode("one two").ids[len(backend.encode("one").ids) :]
    pieces, rest = stream(kind, [*prompt, eos, eos, *answer, eos, *answer], len(prompt))
    assert "".join(pieces) + rest == " two two"


@pytest.mark.parametrize("count", [1, 2, 100])
@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_ids_that_the_tokenizer_does_not_know_have_no_text(kind: str, count: int) -> None:
    """The vocabulary of a model is often padded beyond that of its tokenizer."""
    backend = TOKENIZERS[kind]
    prompt = backend.encode("one").ids
    answer = backend.encode("one two").ids[len(prompt) :]
    unknown = [backend.get_vocab_size()] * count
    pieces, rest = stream(kind, [*prompt, *unknown, *answer, *unknown, *answer], len(prompt))
    assert "".join(pieces) + rest == " two two"


def test_a_special_token_inside_a_character_is_passed_over() -> None:
    for kind, backend in TOKENIZERS.items():
        first, *others = backend.encode("😀").ids[-3:]
        head = backend.encode("😀").ids[:-3]
        eos = backend.token_to_id("</s>")
        pieces, rest = stream(kind, [*head, first, eos, *others], 0)
        assert ("".join(pieces), rest) == ("😀", "")


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("what", ["words", "random", "broken", "special", "unknown"])
def test_cost_does_not_grow_with_the_length(kind: str, what: str) -> None:
    backend = TOKENIZERS[kind]
    broken = backend.token_to_id("<0xFF>") if kind == "byte_fallback" else backend.token_to_id("ÿ")
    ids = {
        "words": backend.encode(CORPUS[0] * 20).ids,
        "random": random.Random(0).choices(range(backend.get_vocab_size()), k=1500),
        "broken": [broken] * 1500,
        "special": [backend.token_to_id("</s>")] * 1500,
        "unknown": [*backend.encode("a").ids, *[backend.get_vocab_size()] * 1500],
    }[what]
    decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return backend.decode(tokens)

    detokenizer = Detokenizer(decode, ids[:500], SPECIAL_IDS[kind])
    before = decoded
    for token in ids[500:]:
        detokenizer.push(token)
    assert before <= 5 * 500
    assert decoded - before <= 60 * len(ids[500:])
    if what == "words":
        assert decoded - before <= 8 * len(ids[500:])


def plain_stop(text: str, words: Sequence[str]) -> tuple[str, bool]:
    """The definition: up to the first place where a word is complete, show what is before the longest such word."""
    for end in range(1, len(text) + 1):
        found = [word for word in words if word and text[:end].endswith(word)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab\n", max_size=30),
    words=st.lists(st.text("ab\n", max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
@example(text="abab", words=["abb", "bab"], cuts=[1, 2, 3])
def test_stop_words_do_not_depend_on_the_pieces(text: str, words: list[str], cuts: list[int]) -> None:
    stop_words = StopWords(words)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    expected, expect_stop = plain_stop(text, words)
    shown, stopped = "", False
    for start, stop in itertools.pairwise(edges):
        piece, stopped = stop_words.push(text[start:stop])
        shown += piece
        assert expected.startswith(shown)
        if stopped:
            break
    assert stopped == expect_stop
    assert shown + ("" if stopped else stop_words.flush()) == expected


def test_only_what_may_become_a_stop_word_is_held_back() -> None:
    stop_words = StopWords(["END", "\n\n"])
    assert stop_words.push("the E") == ("the ", False)
    assert stop_words.push("N") == ("", False)
    assert stop_words.push("E") == ("EN", False)
    assert stop_words.push("\n") == ("E", False)
    assert stop_words.push("x") == ("\nx", False)
    assert stop_words.push("END of it") == ("", True)


def test_an_empty_stop_word_stands_for_none() -> None:
    assert StopWords(["", ""]).push("text") == ("text", False)


def test_long_stop_words_cost_no_more_than_short_ones() -> None:
    stop_words = StopWords(["a" * 10_000 + "b"])
    shown = sum(len(stop_words.push("a" * 7)[0]) for _ in range(10_000))
    assert shown + len(stop_words.flush()) == 70_000
