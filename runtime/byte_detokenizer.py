"""Text of a growing sequence whose tokens are bytes: decoded as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hybridtrt.runtime.token_bytes import MAX_HELD, TokenBytes


class ByteDetokenizer:
    """What `Detokenizer` does, for tokenizers with a table of bytes: no token is decoded twice."""

    __slots__ = ("_bytes", "_drop", "_held")

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int]) -> None:
        self._bytes = token_bytes
        self._held = b""  # the beginning of a character
        tail = b""
        for token in reversed(prompt_ids):
            tail = token_bytes[token] + tail
            if len(tail) >= MAX_HELD:
                break
        self._decode(tail)
        # What the first text does not show: the prompt's last character, unless it is completed, or a leading space.
        self._drop = self._held.decode(errors=token_bytes.errors) if tail else token_bytes.leading

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text that is now certain; "" while a character is incomplete."""
        text = self._decode(b"".join([self._bytes[token] for token in tokens]))
        return self._begin(text) if self._drop else text

    def next(self, token: int) -> str:
        """`push` of one token."""
        if not (self._held or self._drop) and (text := self._bytes.texts[token]) is not None:
            return text
        return self.push(token)

    def flush(self) -> str:
        """The text of what is still held back, when no more will come."""
        return self._begin(self._decode(b"", final=True))

    def _decode(self, new: bytes, final: bool = False) -> str:
        data = self._held + new
        text, length = codecs.utf_8_decode(data, self._bytes.errors, final)
        self._held = data[length:]
        return text

    def _begin(self, text: str) -> str:
        if not text:
            return ""
        drop, self._drop = self._drop, ""
        return text.removeprefix(drop)
