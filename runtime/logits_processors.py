"""What a request changes in the logits before one is chosen: bias, penalties, and tokens that are forbidden."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.tokenizer import Tokenizer

Logits = NDArray[np.float32]  # [V], one row
Ids = NDArray[np.int64]
Tokens = tuple[int, ...]

FORBIDDEN = -np.inf
ANCHOR = "\x1f"  # a control character, which merges with no word


class LogitsProcessor:
    """One rule. What it must know of the output it learns token by token, and can forget again from the end."""

    def push(self, token: int) -> None:
        """A token was added to the output."""

    def pop(self, token: int) -> None:
        """The token that was added last is taken back."""

    def apply(self, logits: Logits) -> None:
        """Change a row of logits in place."""
        raise NotImplementedError


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._ids = np.array([token for token, _ in biases], np.int64)
        self._biases = np.array([bias for _, bias in biases], np.float32)

    def apply(self, logits: Logits) -> None:
        logits[self._ids] += self._biases


class Penalties(LogitsProcessor):
    """Makes tokens that have occurred less likely.

    Repetition (CTRL, arXiv 1909.05858): a positive logit is divided by the penalty and a negative one multiplied, for
    tokens of prompt and output. Then presence and frequency, as OpenAI's interface defines them: the logit falls by
    the first when the token is in the output, and by the second for each time that it is.
    """

    def __init__(self, repetition: float, presence: float, frequency: float, prompt_ids: Sequence[int]) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._ids = np.unique(np.array(prompt_ids if repetition != 1 else (), np.int64))  # that have occurred
        self._counts = np.zeros(len(self._ids), np.int64)  # in the output
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self._of_prompt = len(self._ids)

    def push(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids = np.append(self._ids, token)
            self._counts = np.append(self._counts, 0)
        self._counts[place] += 1

    def pop(self, token: int) -> None:
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place] == 0 and place >= self._of_prompt:
            del self._places[token]
            self._ids, self._counts = self._ids[:-1], self._counts[:-1]

    def apply(self, logits: Logits) -> None:
        values = logits[self._ids]
        if self._repetition != 1:
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        if self._presence or self._frequency:
            values -= self._presence * (self._counts > 0) + self._frequency * self._counts
        logits[self._ids] = values


class BadWords(LogitsProcessor):
    """Forbids the last token of each sequence of tokens that prompt and output would complete."""

    def __init__(self, words: Iterable[Tokens], prompt_ids: Sequence[int]) -> None:
        words = dict.fromkeys(words)
        self._always = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._after: dict[int, list[Tokens]] = {}  # longer ones by their last token but one
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        longest = max(map(len, words))
        self._history = list(prompt_ids[-longest:])

    def push(self, token: int) -> None:
        self._history.append(token)

    def pop(self, token: int) -> None:
        self._history.pop()

    def apply(self, logits: Logits) -> None:
        logits[self._always] = FORBIDDEN
        for word in self._after.get(self._history[-1], ()):
            if tuple(self._history[1 - len(word) :]) == word[:-1]:
                logits[word[-1]] = FORBIDDEN


class MinTokens(LogitsProcessor):
    """Forbids the tokens that end an answer until it has enough of them."""

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._missing = min_tokens
        self._stop_ids = np.array(sorted(stop_ids), np.int64)

    def push(self, token: int) -> None:
        self._missing -= 1

    def pop(self, token: int) -> None:
        self._missing += 1

    def apply(self, logits: Logits) -> None:
        if self._missing > 0:
            logits[self._stop_ids] = FORBIDDEN


class LogitsProcessors:
    """The rules of one answer, in the order of transformers: bias, penalties, bad words, least length."""

    def __init__(self, rules: Sequence[LogitsProcessor]) -> None:
        self._rules = rules

    def append(self, token: int) -> None:
        """A token was added to the output."""
        for rule in self._rules:
            rule.push(token)

    def apply(self, logits: Logits, drafts: Sequence[int]) -> None:
        """Change one row of logits `[V]` in place, as if `drafts` had been appended too."""
        for rule in self._rules:
            for token in drafts:
                rule.push(token)
            rule.apply(logits)
            for token in reversed(drafts):
                rule.pop(token)


def make_processors(
    request: Request, stop_ids: frozenset[int], tokenizer: Tokenizer | None, vocab_size: int
) -> LogitsProcessors | None:
    """The rules that a valid request asks for, or None when it asks for none.

    `stop_ids` are the tokens that end its answer. Raises `ValueError` for bad words without a tokenizer.
    """
    params = request.params
    rules: list[LogitsProcessor] = []
    if params.logit_bias:
        rules.append(LogitBias(params.logit_bias))
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties != (1, 0, 0):
        rules.append(Penalties(*penalties, request.prompt_ids))
    known = range(vocab_size)
    words = [word for word in _bad_words(params, tokenizer) if all(token in known for token in word)]
    if words:
        rules.append(BadWords(words, request.prompt_ids))
    ends = stop_ids.intersection(known)
    if params.min_tokens and ends:
        rules.append(MinTokens(params.min_tokens, ends))
    return LogitsProcessors(rules) if rules else None


def tokenizations(word: str, tokenizer: Tokenizer) -> set[Tokens]:
    """Token ids of a word with and without a leading space, each at the beginning of a text and inside one.

    The places differ where the tokenizer puts a space before a text (SentencePiece).
    """
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    found = set[Tokens]()
    bare = word.removeprefix(" ")
    for text in (bare, " " + bare):
        found.add(tokenizer.encode(text, add_special_tokens=False))
        inside = tokenizer.encode(ANCHOR + text, add_special_tokens=False)
        if inside[: len(anchor)] == anchor:
            found.add(inside[len(anchor) :])
    return found - {()}


def _bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> list[Tokens]:
    words = [tuple(word) for word in params.bad_token_ids]
    if params.bad_words:
        if tokenizer is None:
            raise ValueError(f"bad_words={params.bad_words!r} need a tokenizer, and the engine has none")
        for word in params.bad_words:
            words += sorted(tokenizations(word, tokenizer))
    return words
