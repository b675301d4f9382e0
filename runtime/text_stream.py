"""From the tokens of one sequence to the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrt.runtime.detokenizer import Detokenizer
from hybridtrt.runtime.stop_words import StopWords
from hybridtrt.runtime.tokenizer import Tokenizer


class TextStream:
    """Detokenises incrementally and cuts at stop words."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_words: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer.decode, prompt_ids, tokenizer.special_ids)
        self._stop_words = StopWords(stop_words)

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; return the text that can be shown now and whether a stop word is complete."""
        return self._stop_words.push(self._detokenizer.push(token))

    def finish(self) -> tuple[str, bool]:
        """The text held back, when no more tokens will come, and whether it completes a stop word."""
        text, stopped = self._stop_words.push(self._detokenizer.flush())
        return (text, True) if stopped else (text + self._stop_words.flush(), False)
