"""From the tokens of one sequence to the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrt.runtime.byte_detokenizer import ByteDetokenizer
from hybridtrt.runtime.detokenizer import Detokenizer
from hybridtrt.runtime.stop_words import StopWords
from hybridtrt.runtime.tokenizer import Tokenizer


class TextStream:
    """Detokenises incrementally and cuts at stop words.

    A stop word is one only where its last token has at least `min_tokens - 1` others before it; text goes through
    otherwise.
    """

    __slots__ = ("_detokenizer", "_missing", "_stop_words", "next")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_words: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        table = tokenizer.token_bytes
        self._detokenizer = (
            Detokenizer(tokenizer.decode, prompt_ids, tokenizer.special_ids)
            if table is None
            else ByteDetokenizer(table, prompt_ids)
        )
        self.next = self._detokenizer.next  # the text of one more token, where there are no stop words
        self._stop_words = StopWords(stop_words) if any(stop_words) else None
        self._missing = min_tokens  # tokens until stop words count

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; return the text that can be shown now and whether a stop word is complete."""
        return self.push_many((token,))

    def push_many(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Add tokens, which are decoded at once when there are no stop words. Those after a stop word have no text."""
        if self._stop_words is None:
            return self._detokenizer.push(*tokens), False
        pieces = []
        for token in tokens:
            self._missing -= 1
            piece, stopped = self._stop_words.push(self._detokenizer.push(token), self._missing <= 0)
            pieces.append(piece)
            if stopped:
                return "".join(pieces), True
        return "".join(pieces), False

    def finish(self) -> tuple[str, bool]:
        """The text held back, when no more tokens will come, and whether it completes a stop word."""
        rest = self._detokenizer.flush()
        if self._stop_words is None:
            return rest, False
        text, stopped = self._stop_words.push(rest, self._missing <= 0)
        return (text, True) if stopped else (text + self._stop_words.flush(), False)
