"""Stop words in streamed text: found wherever the pieces are cut, and never shown, not even in part."""

from __future__ import annotations

import re
from collections.abc import Iterable


class _Word:
    """How much of one stop word the text read so far ends with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0
        self._fallback = [0] * len(word)  # of a prefix that ends here: its longest border
        border = 0
        for i in range(1, len(word)):
            while border and word[i] != word[border]:
                border = self._fallback[border - 1]
            border += word[i] == word[border]
            self._fallback[i] = border

    def read(self, char: str) -> bool:
        """Read one more character; true when the word is complete."""
        while self.matched and char != self.word[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.word[self.matched]
        if self.matched < len(self.word):
            return False
        self.matched = self._fallback[-1]
        return True


class StopWords:
    """Passes text through until the first stop word is complete, and holds back what may become one.

    The result does not depend on how the text is cut into pieces; the cost is linear in the text, and small where no
    word begins. An empty word stands for none.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [_Word(word) for word in dict.fromkeys(words) if word]
        first = "".join(word.word[0] for word in self._words)
        self._first = re.compile(f"[{re.escape(first)}]" if first else "(?!)")  # the latter matches nothing
        self._held = ""

    def push(self, text: str, stops: bool = True) -> tuple[str, bool]:
        """Read a piece; return the text that is safe to show and whether a stop word is complete.

        Words that are complete in a piece which not `stops` are text, like any other.
        """
        start = len(self._held)
        if not start:
            begins = self._first.search(text)
            if begins is None:
                return text, False
            start = begins.start()
        buffer = self._held + text
        for place in range(start, len(buffer)):
            found = [len(word.word) for word in self._words if word.read(buffer[place])]
            if found and stops:
                self._held = ""
                return buffer[: place + 1 - max(found)], True
        held = max(word.matched for word in self._words)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held], False

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        return text
