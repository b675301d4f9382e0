"""Structured output: the tokens that keep an answer inside a JSON schema, an expression or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) parses the answer (Earley) and walks the trie of the vocabulary
for what may follow.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray

from hybridtrt.runtime.tokenizer import Tokenizer, valid_text

MAX_GUIDE_BYTES = 64 << 10
COMPILER_STACK = 512 << 20  # llguidance recurses along references: about 500 bytes of stack for each byte of a guide
STACK_SIZE = threading.Lock()  # of new threads: the process has one
MAX_WORKERS = 8
MAX_REASON = 200  # characters of an error of llguidance
# A grammar that grows too ambiguous ends its own request, after masks of at most some 50 ms and 20 MB.
LIMITS = LLParserLimits(max_items_in_row=500, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False)

Mask = NDArray[np.uint32]


class Guides:
    """Compiles the guides of one engine; any thread may. Its threads and the tables of the vocabulary come with use.

    `vocab_size` is the model's; `end_ids` are the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._compiler = ThreadPoolExecutor(1, "guide-compiler")
        self._workers = ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_WORKERS), "guide-mask")

    def compile(self, guide_type: str, guide: str) -> Guide:
        """The guide of a new answer.

        "json" is any JSON object, and `guide` is not read; "json_schema" a JSON schema; "regex" an expression of Rust's
        regex crate without look-around, which the whole text matches; "ebnf_grammar" a grammar in llama.cpp's GBNF
        (`root ::= ...`) or llguidance's Lark (`start: ...`).

        Raises `ValueError`, one line, for a guide that does not compile or that no text matches, and for a tokenizer
        that llguidance does not know.
        """
        if len(valid_text(guide).encode()) > MAX_GUIDE_BYTES:
            raise ValueError(f"guide of {len(guide.encode())} bytes; expected at most {MAX_GUIDE_BYTES}")
        with _stack_of_new_threads(COMPILER_STACK):
            matcher = self._compiler.submit(self._matcher, guide_type, guide)
        return Guide(matcher.result(), self._known, self._workers)

    def close(self) -> None:
        """Stop the threads. Guides give no more masks."""
        for pool in (self._compiler, self._workers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, guide_type: str, guide: str) -> LLMatcher:
        """A new matcher: copies share the lexer's limits, so that the answers of others would use them up."""
        tables = self._tables
        try:
            matcher = LLMatcher(tables, _grammar(guide_type, guide), log_level=0, limits=LIMITS)
        except ValueError as error:
            reason = str(error)
        else:
            reason = matcher.get_error()
        if reason:
            raise ValueError(f"the guide of guide_type={guide_type!r} does not compile: {_line(reason)}")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"no text matches the guide of guide_type={guide_type!r}: {_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _tables(self) -> LLTokenizer:
        """The vocabulary as a trie; a second's work for a large one. Raises `ValueError`."""
        backend = self._tokenizer.backend
        if backend is None:
            raise ValueError("guides need a fast tokenizer that does not clean up spaces")
        ends = sorted(token for token in self._end_ids if token < min(self._size, self._vocab_size))
        if not ends:
            raise ValueError(f"guides need an end token of the tokenizer; the model's are {sorted(self._end_ids)}")
        # A space put before texts would be a token that no guide expects. Inside strings of JSON, quotes are escaped.
        text = backend.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
        try:
            return LLTokenizer(text, n_vocab=max(self._size, self._vocab_size), eos_token=ends)
        except ValueError as error:
            raise ValueError(f"guides cannot be used with this tokenizer: {_line(str(error))}") from None

    @cached_property
    def _size(self) -> int:
        """The size of the tokenizer's vocabulary, in which ids may be missing."""
        return 1 + int(max(self._tokenizer.backend.get_vocab().values()))

    @cached_property
    def _known(self) -> Mask:
        """The tokens that both the model and the tokenizer have, as bits."""
        known = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        known[: min(self._size, self._vocab_size)] = 1
        return np.packbits(known, bitorder="little").view("<u4")


class Guide:
    """Where one answer stands in its guide. It belongs to one thread; `start` lets a worker go ahead."""

    def __init__(self, matcher: LLMatcher, known: Mask, workers: ThreadPoolExecutor) -> None:
        self._first = matcher
        self._matcher = matcher.deep_copy()
        self._known = known
        self._workers = workers
        self._next: Future[Mask] | None = None

    def copy(self) -> Guide:
        """The guide for another answer, from its beginning."""
        return Guide(self._first, self._known, self._workers)

    def start(self) -> None:
        """Begin to compute the mask of the next token, unless that is under way."""
        self._future()

    def mask(self) -> Mask:
        """The tokens that may come next, one bit a token of the model's vocabulary, lowest bit first: `[ceil(V / 32)]`.

        They include the end tokens where the text is complete. There are none when there is an `error`.
        """
        return self._future().result()

    def accept(self, token: int) -> None:
        """Move past a token. Raises `RuntimeError`, one line, when the guide forbids it, and ever after."""
        matcher, self._next = self._settled(), None
        if not matcher.consume_token(token):
            raise RuntimeError(f"the guide does not accept token {token}: {_line(matcher.get_error())}")

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow, or has followed."""
        return self._settled().is_stopped()

    @property
    def error(self) -> str:
        """Why no token can follow, one line; "" where one can. A guide that has become too complex comes to this."""
        return _line(self._settled().get_error())

    def _future(self) -> Future[Mask]:
        if self._next is None:
            self._next = self._workers.submit(self._compute)
        return self._next

    def _settled(self) -> LLMatcher:
        """The matcher, when no worker has it."""
        if self._next is not None:
            self._next.result()
        return self._matcher

    def _compute(self) -> Mask:
        words = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        return np.zeros_like(self._known) if self._matcher.is_error() else words[: len(self._known)] & self._known


def _grammar(guide_type: str, guide: str) -> str:
    match guide_type:
        case "json":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_schema(guide))
        case "regex":
            return LLMatcher.grammar_from_regex(guide)
        case "ebnf_grammar":
            return grammar_from("gbnf", guide)
    raise ValueError("expected json, json_schema, regex or ebnf_grammar")


def _schema(guide: str) -> str:
    """The schema, read and written again: llguidance pastes it into a larger document."""
    try:
        return json.dumps(json.loads(guide))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _line(error: str) -> str:
    """The line of an error of llguidance that says what is wrong."""
    lines = error.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")[:MAX_REASON]


@contextmanager
def _stack_of_new_threads(size: int) -> Iterator[None]:
    with STACK_SIZE:
        before = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(before)
