"""Stop words in streamed text: found wherever the pieces are cut, and never shown, not even in part."""

from __future__ import annotations

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
        """Read one more character; true when the word is complete. It must not be read on after that."""
        while self.matched and char != self.word[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.word[self.matched]
        return self.matched == len(self.word)


class StopWords:
    """Passes text through until the first stop word is complete, and holds back what may become one.

    The result does not depend on how the text is cut into pieces; the cost is linear in the text. An empty word
    stands for none.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [_Word(word) for word in dict.fromkeys(words) if word]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Read a piece; return the text that is safe to show and whether a stop word is complete."""
        if not self._words:
            return text, False
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            found = [len(word.word) for word in self._words if word.read(buffer[end - 1])]
            if found:
                self._held = ""
                return buffer[: end - max(found)], True
        held = max(word.matched for word in self._words)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held], False

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        return text
