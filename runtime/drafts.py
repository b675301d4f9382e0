"""Drafts by prompt lookup: where the last tokens have occurred before, what followed them then may follow again.

After "prompt lookup decoding" (A. Saxena, 2023), with drafts as long as they have lately been right.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3  # with 2 more is proposed and more of it is wrong: no faster on code and prose, slower on JSON
TOKEN_BITS = 32
KEY_MASK = (1 << NGRAM * TOKEN_BITS) - 1
MAX_MATCH = 31  # tokens; matches that are longer are not told apart
RIGHT_AT_FIRST = 0.8
LEARNING = 1 / 8  # weight of the newest token in what has been right
LEAST_CHANCE = 0.5  # of a drafted token; wrong drafts cost themselves and a second run of the right ones before them


class NgramDrafter:
    """Goes on from the last place with the same `NGRAM` tokens, and follows it for as long as it is right.

    How often it is right is learned from every token of the answer, drafted or not, apart for matches of 3, up to 7, up
    to 15 and more tokens. So nothing is drafted where it would mostly be wrong, and a repeat is seen without a try.
    A token costs a look-up at most, whatever the length of the text.
    """

    def __init__(self, prompt: Sequence[int], max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._tokens: list[int] = []
        self._key = 0  # the last NGRAM tokens
        self._behind: dict[int, int] = {}  # the place behind the last occurrence of such a key
        self._source = 0  # the place that is copied from, 0: none
        self._matched = 0  # how many tokens before it are the last ones of the text
        self._right = [RIGHT_AT_FIRST] * (MAX_MATCH.bit_length() + 1)  # how often the source was, by bits of `_matched`
        for token in prompt:
            self._push(token)
            self._behind[self._key] = len(self._tokens)

    def append(self, token: int) -> None:
        """Add a token of the answer."""
        source = self._source
        right = source > 0 and self._tokens[source] == token
        if source:
            size = self._matched.bit_length()
            self._right[size] += (right - self._right[size]) * LEARNING
        self._push(token)
        if right:
            self._source += 1
            self._matched = min(self._matched + 1, MAX_MATCH)
        else:
            self._source = self._behind.get(self._key, 0)
            self._matched = self._match(self._source)
        self._behind[self._key] = len(self._tokens)

    def propose(self, limit: int) -> list[int]:
        """The tokens that may come next, at most `limit` and `max_draft_tokens`; none where that does not pay.

        A source that reaches the end of the text goes on into the draft: a cycle is drafted at any length.
        """
        if not self._source:
            return []
        right = self._right[self._matched.bit_length()]
        chance, length = right, 0
        while chance >= LEAST_CHANCE and length < min(limit, self._max_draft_tokens):
            length += 1
            chance *= right
        cycle = len(self._tokens) - self._source
        return [self._tokens[self._source + i % cycle] for i in range(length)]

    def _push(self, token: int) -> None:
        self._tokens.append(token)
        self._key = (self._key << TOKEN_BITS | token + 1) & KEY_MASK

    def _match(self, source: int) -> int:
        """How many tokens before the source are the last ones of the text."""
        tokens, length = self._tokens, 0
        while length < min(source, MAX_MATCH) and tokens[source - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
