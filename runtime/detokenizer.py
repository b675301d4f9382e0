"""Text of a growing sequence, piece by piece: complete characters only, nothing lost, doubled or taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from hybridtrt.runtime.token_bytes import BROKEN, MAX_HELD

FIRST_WINDOW = 8  # tokens of the prompt that are decoded with the first output; more when they begin inside a character
MAX_PENDING = 32  # tokens without a complete end, all invalid by then but the last

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes a window of the last tokens and returns what is new.

    Tokenizers decode a token differently after other tokens (spaces, bytes), so the window begins with tokens whose
    text has been returned already. It moves on whenever it ends in a complete character: the cost of a token does not
    grow with the text. Tokens in `skip` (special tokens) have no text.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], skip: Collection[int] = ()) -> None:
        self._decode = decode
        self._skip = skip
        self._ids = self._prompt_window(prompt_ids)
        self._done = len(self._ids)  # leading tokens of the window whose text has been returned
        self._prompt = self._sent = decode(self._ids) if self._ids else ""
        if self._sent.endswith(BROKEN):
            self._split_prompt()

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text that is now certain; "" while a character is incomplete.

        It is the text that they would give one by one, but decoded at once where no character is incomplete.
        """
        new = [token for token in tokens if token not in self._skip]
        if not new:
            return ""
        text = self._decode([*self._ids, *new])
        if len(new) > 1 and BROKEN in text:
            return "".join([self.push(token) for token in new])
        self._ids += new
        return self._read(text)

    def next(self, token: int) -> str:
        """`push` of one token."""
        return self.push(token)

    def flush(self) -> str:
        """The text of what is still held back, as the tokenizer decodes it, when no more will come."""
        if len(self._ids) == self._done:
            return ""
        text = self._aligned(self._decode(self._ids))
        sent = self._prompt if self._prompt and text.startswith(self._prompt) else self._sent
        self._ids, self._done, self._prompt, self._sent = [], 0, "", ""
        return text[len(sent) :]

    def _read(self, text: str) -> str:
        """What is new and certain in the text of the window."""
        text = self._aligned(text)
        certain = _certain(text)
        if self._prompt and certain.startswith(self._prompt):
            self._sent, self._prompt = self._prompt, ""  # the prompt ended in U+FFFD indeed
        delta = certain[len(self._sent) :]
        if delta:
            self._sent, self._prompt = certain, ""
        if delta and len(certain) == len(text):
            self._move(self._done)
        elif len(self._ids) - self._done > MAX_PENDING:
            if len(certain) == len(text):
                del self._ids[self._done :]  # none of them has text
            else:
                self._move(len(self._ids) - MAX_PENDING // 2)
        return delta

    def _aligned(self, text: str) -> str:
        """The text of the window, which begins with what has been sent."""
        if text.startswith(self._sent):
            return text
        # Byte fallback decodes a whole run of bytes to U+FFFD while its end is incomplete: read the new ones alone.
        self._ids, self._done, self._prompt, self._sent = self._ids[self._done :], 0, "", ""
        return self._decode(self._ids)

    def _move(self, start: int) -> None:
        self._ids = self._ids[start:]
        text = self._decode(self._ids)
        self._sent, self._prompt = _certain(text), ""
        self._done = len(self._ids) if len(self._sent) == len(text) else 0

    def _prompt_window(self, prompt_ids: Sequence[int]) -> list[int]:
        length = FIRST_WINDOW
        while True:
            tail = list(islice((token for token in reversed(prompt_ids) if token not in self._skip), length))[::-1]
            if len(tail) < length or not self._decode(tail).startswith(BROKEN):
                return tail
            length *= 4

    def _split_prompt(self) -> None:
        """Let the tokens of an incomplete last character be pending."""
        self._sent, self._done = self._sent.rstrip(BROKEN), 0
        for count in range(1, min(MAX_HELD, len(self._ids)) + 1):
            head = self._decode(self._ids[:-count]) if count < len(self._ids) else ""
            if not head.endswith(BROKEN):
                self._sent = max(self._sent, head, key=len)
                self._done = len(self._ids) - count
                break


def _certain(text: str) -> str:
    """The text without what later tokens may still change: the last U+FFFD, up to three."""
    held = min(len(text) - len(text.rstrip(BROKEN)), MAX_HELD)
    return text[: len(text) - held]
