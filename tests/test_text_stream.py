"""Text of one answer with stop words: where it ends, from which token on, and at every stream interval."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers_for_tests import byte_fallback, byte_level, kept, metaspace

from hybridtrt.runtime.text_stream import TextStream
from hybridtrt.runtime.tokenizer import Tokenizer

BACKENDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
kinds = st.sampled_from(sorted(BACKENDS))
words = st.text("ab ,", max_size=3)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(kept(BACKENDS[kind]()))


def answer(kind: str, text: str) -> tuple[list[int], list[int]]:
    """A prompt and an answer that continues it with one token a character where the tokenizer has them."""
    prompt = BACKENDS[kind]().encode("it is").ids
    return prompt, [token for char in text for token in BACKENDS[kind]().encode("x" + char).ids[1:]]


def expected(pieces: list[str], stop_words: list[str], min_tokens: int) -> tuple[str, int]:
    """The definition: what is shown, and how many tokens it takes."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            found = [word for word in stop_words if word and text.endswith(word)]
            if found and count >= min_tokens:
                return text[: len(text) - max(map(len, found))], count
    return text, len(pieces)


@settings(max_examples=300, deadline=None)
@given(
    kind=kinds,
    text=st.text("ab ,é😀", max_size=16),
    stop_words=st.lists(words, max_size=3),
    min_tokens=st.integers(0, 12),
    interval=st.sampled_from([1, 2, 8]),
)
@example(kind="byte_level", text="ababab", stop_words=["abab"], min_tokens=5, interval=1)
@example(kind="byte_level", text="aaaa", stop_words=["aa"], min_tokens=3, interval=2)
def test_an_answer_ends_at_the_first_stop_word_that_counts(
    kind: str, text: str, stop_words: list[str], min_tokens: int, interval: int
) -> None:
    prompt, tokens = answer(kind, text)
    plain = TextStream(tokenizer(kind), prompt)
    pieces = [plain.push(token)[0] for token in tokens]
    assert plain.finish() == ("", False)
    whole, count = expected(pieces, stop_words, min_tokens)

    stream, shown, stopped = TextStream(tokenizer(kind), prompt, stop_words, min_tokens), "", False
    for start in range(0, len(tokens), interval):
        piece, stopped = stream.push_many(tokens[start : start + interval])
        shown += piece
        assert whole.startswith(shown)
        if stopped:
            assert start < count <= start + interval
            break
    if not stopped:
        shown += stream.finish()[0]
    assert shown == whole
    assert stopped == (whole != "".join(pieces))


def test_a_stop_word_may_begin_before_the_least_length() -> None:
    prompt, tokens = answer("byte_level", "abcd")
    stream = TextStream(tokenizer("byte_level"), prompt, ["abc"], min_tokens=3)
    assert [stream.push(token) for token in tokens[:3]] == [("", False), ("", False), ("", True)]
    stream = TextStream(tokenizer("byte_level"), prompt, ["abc"], min_tokens=4)
    assert [stream.push(token) for token in tokens] == [("", False), ("", False), ("abc", False), ("d", False)]


@pytest.mark.parametrize(("min_tokens", "end"), [(2, ("", True)), (9, ("\ufffd" * 3, False))])
def test_what_is_flushed_may_complete_a_stop_word(min_tokens: int, end: tuple[str, bool]) -> None:
    backend = byte_fallback()
    tokens = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()[:3]]
    stream = TextStream(tokenizer("byte_fallback"), backend.encode("it is").ids, ["\ufffd\ufffd\ufffd"], min_tokens)
    assert [stream.push(token) for token in tokens] == [("", False)] * 3
    assert stream.finish() == end


def without_fast_path(kind: str) -> Tokenizer:
    slow = Tokenizer(kept(BACKENDS[kind]()))
    slow.token_bytes = None
    return slow


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_tables_of_bytes_give_the_text_that_decoding_gives(kind: str) -> None:
    prompt = BACKENDS[kind]().encode("the").ids
    tokens = BACKENDS[kind]().encode("the quick 日本 😀 brown").ids[len(prompt) :]
    for first in (prompt, prompt[:0], [tokenizer(kind).bos_token_id]):
        fast, slow = (TextStream(each, first) for each in (tokenizer(kind), without_fast_path(kind)))
        assert [fast.push(token) for token in tokens] == [slow.push(token) for token in tokens]
        assert fast.finish() == slow.finish()


def test_added_tokens_that_are_not_special_are_text() -> None:
    backend = Backend.from_str(byte_level().to_str())
    backend.add_tokens([AddedToken("<think>", special=False)])
    stream = TextStream(Tokenizer(kept(backend)), backend.encode("a").ids, ["<think>b"])
    shown = [stream.push(token) for token in backend.encode("<think>,</s><think>b").ids]
    assert shown == [("", False), ("<think>,", False), ("", False), ("", False), ("", True)]
