"""Streamed text: nothing lost, doubled, broken or leaked, wherever prompts, tokens and pieces are cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers_for_tests import CORPUS, SPECIALS, byte_fallback, byte_level, metaspace
from tokenizers_for_tests import token_bytes as bytes_of

from hybridtrt.runtime.byte_detokenizer import ByteDetokenizer
from hybridtrt.runtime.detokenizer import BROKEN, Detokenizer
from hybridtrt.runtime.stop_words import StopWords
from hybridtrt.runtime.token_bytes import token_bytes

TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_level, table": byte_level(),
    "byte_fallback": byte_fallback(),
    "byte_fallback, table": byte_fallback(),
}
SPECIAL_IDS = {name: frozenset(map(backend.token_to_id, SPECIALS)) for name, backend in TOKENIZERS.items()}
TABLES = {
    name: token_bytes(backend, SPECIAL_IDS[name]) if name.endswith("table") else None
    for name, backend in TOKENIZERS.items()
}

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
intervals = st.sampled_from([1, 2, 8])


def falls_back(kind: str) -> bool:
    return kind.startswith("byte_fallback")


def new_detokenizer(kind: str, prompt: Sequence[int]) -> Detokenizer | ByteDetokenizer:
    table = TABLES[kind]
    if table is not None:
        return ByteDetokenizer(table, prompt)
    return Detokenizer(TOKENIZERS[kind].decode, prompt, SPECIAL_IDS[kind])


def stream(kind: str, ids: Sequence[int], prompt_length: int, interval: int = 1) -> tuple[list[str], str]:
    """The pieces that come out, and what is flushed at the end."""
    detokenizer = new_detokenizer(kind, ids[:prompt_length])
    starts = range(prompt_length, len(ids), interval)
    pieces = [detokenizer.push(*ids[start : start + interval]) for start in starts]
    return pieces, detokenizer.flush()


def test_tokens_of_the_byte_level_tokenizer_end_inside_characters() -> None:
    tokens = TOKENIZERS["byte_level"].encode("日本 😀").tokens
    assert any(bytes_of(TOKENIZERS["byte_level"], token).decode(errors="replace")[-1] == BROKEN for token in tokens)
    assert "<0xE6>" in TOKENIZERS["byte_fallback"].encode("日").tokens


@settings(max_examples=300, deadline=None)
@given(kind=kinds, text=texts, cut=st.integers(0, 100), interval=intervals)
@example(kind="byte_level", text="x 😀y", cut=2, interval=1)
@example(kind="byte_level", text="日本", cut=2, interval=1)
@example(kind="byte_fallback", text="你好", cut=6, interval=1)
def test_pieces_join_to_the_text_without_the_prompt(kind: str, text: str, cut: int, interval: int) -> None:
    backend = TOKENIZERS[kind]
    encoding = backend.encode(text)
    cut = min(cut, len(encoding.ids))
    pieces, rest = stream(kind, encoding.ids, cut, interval)
    prompt = b"".join(bytes_of(backend, token) for token in encoding.tokens[:cut])
    whole = b"".join(bytes_of(backend, token) for token in encoding.tokens)
    assert whole.decode().removeprefix(" " if falls_back(kind) else "") == backend.decode(encoding.ids) == text
    complete = len(prompt.decode(errors="ignore"))  # the character in which the prompt ends comes with the output
    stripped = falls_back(kind) and cut == 0
    assert "".join(pieces) == whole.decode()[complete + stripped :]
    assert rest == ""
    assert not any(BROKEN in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["byte_level", "byte_level, table"]),
    prompt=texts,
    seed=st.integers(0, 10_000),
    count=st.integers(1, 60),
    interval=intervals,
)
def test_random_tokens_join_to_the_decoded_whole(kind: str, prompt: str, seed: int, count: int, interval: int) -> None:
    backend = TOKENIZERS[kind]
    ids = backend.encode(prompt).ids
    start = len(ids)
    ids += random.Random(seed).choices(range(backend.get_vocab_size()), k=count)
    pieces, rest = stream(kind, ids, start, interval)
    assert prompt + "".join(pieces) + rest == backend.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["byte_fallback", "byte_fallback, table"]),
    seed=st.integers(0, 10_000),
    count=st.integers(1, 80),
    prompt_length=st.integers(0, 20),
    interval=intervals,
)
def test_bytes_in_disorder_do_not_hurt_the_words_around_them(
    kind: str, seed: int, count: int, prompt_length: int, interval: int
) -> None:
    backend = TOKENIZERS[kind]
    words = backend.encode(CORPUS[0]).ids
    high = [backend.token_to_id(f"<0x{byte:02X}>") for byte in (0x80, 0x9F, 0xA0, 0xBD, 0xC3, 0xE4, 0xF0, 0xFF)]
    ids = backend.encode("x").ids + random.Random(seed).choices(words + high * 8, k=count + prompt_length)
    prompt_length += 2
    pieces, rest = stream(kind, ids, prompt_length, interval)
    words_only = [token for token in ids if token not in high]
    behind = len(backend.decode([token for token in ids[:prompt_length] if token not in high]))
    shown = "".join(char for char in "".join(pieces) + rest if char < "\x80")
    assert shown == backend.decode(words_only)[behind:]


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["byte_level", "byte_level, table", "byte_fallback, table"]),
    seed=st.integers(0, 10_000),
    count=st.integers(1, 80),
    prompt_length=st.integers(0, 12),
    interval=st.integers(2, 12),
    words=st.integers(0, 20),
)
def test_tokens_at_once_have_the_text_that_they_have_one_by_one(
    kind: str, seed: int, count: int, prompt_length: int, interval: int, words: int
) -> None:
    """Whatever they are: words, special and unknown ids, and bytes in any order, which words hold apart or not."""
    backend = TOKENIZERS[kind]
    tokens = [*range(backend.get_vocab_size() + 5), *backend.encode(CORPUS[0]).ids * words]
    ids = random.Random(seed).choices(tokens, k=count + prompt_length)
    pieces, rest = stream(kind, ids, prompt_length)
    joined, end = stream(kind, ids, prompt_length, interval)
    assert ("".join(joined), end) == ("".join(pieces), rest)
    detokenizer = new_detokenizer(kind, ids[:prompt_length])
    assert [detokenizer.next(token) for token in ids[prompt_length:]] == pieces


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab the,.", max_size=40), cut=st.integers(0, 20), interval=intervals)
def test_a_tokenizer_without_bytes_is_decoded_as_a_whole(text: str, cut: int, interval: int) -> None:
    backend = metaspace()
    ids = backend.encode(text).ids
    detokenizer = Detokenizer(backend.decode, ids[:cut])
    pieces = [detokenizer.push(*ids[start : start + interval]) for start in range(cut, len(ids), interval)]
    assert backend.decode(ids[:cut]) + "".join(pieces) + detokenizer.flush() == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_several_complete_tokens_cost_one_decoding_and_one_of_the_window(kind: str) -> None:
    backend, calls = TOKENIZERS[kind], 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return backend.decode(tokens)

    ids = [backend.token_to_id("q")] * 8
    detokenizer = Detokenizer(decode, ids)
    calls = 0
    assert detokenizer.push(*ids) == "q" * 8
    assert calls == 2


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tables_are_those_of_the_tokenizers(make: Callable[[], Backend]) -> None:
    backend = Backend.from_str(make().to_str())
    backend.add_tokens(["<think>", "日 本", "é!", "▁<0xZZ>"])
    table = token_bytes(backend, [backend.token_to_id(token) for token in SPECIALS])
    assert table is not None
    assert table[backend.get_vocab_size()] == b""
    first = backend.encode("x").ids  # behind it no space is dropped
    for token in range(backend.get_vocab_size()):
        expected = backend.decode([*first, token])[1:]
        assert table[token].decode(errors="replace") == expected


def test_other_tokenizers_have_no_table() -> None:
    assert token_bytes(metaspace(), []) is None
    assert token_bytes(Backend(models.BPE()), []) is None
    backend = Backend.from_str(byte_fallback().to_str())
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    )
    assert token_bytes(backend, []) is None


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback, table"])
def test_a_whole_run_of_bytes_that_ends_broken_does_not_take_back_what_was_shown(kind: str) -> None:
    backend = TOKENIZERS[kind]
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xe4"] + backend.encode("a").ids[1:]
    assert backend.decode(ids) == BROKEN * 4 + "a"
    pieces, rest = stream(kind, ids, 0)
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


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("what", ["words", "random", "broken", "special", "unknown"])
def test_cost_does_not_grow_with_the_length(kind: str, what: str) -> None:
    backend = TOKENIZERS[kind]
    broken = backend.token_to_id("<0xFF>") if falls_back(kind) else backend.token_to_id("ÿ")
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
