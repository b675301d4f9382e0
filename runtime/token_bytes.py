"""The bytes that tokens stand for, where the text of a sequence is its tokens' bytes and nothing else."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from typing import Any

BROKEN = "\ufffd"  # what tokenizers decode incomplete or invalid UTF-8 to
MAX_HELD = 3  # a character of UTF-8 that is incomplete has at most three bytes
REPLACE_EACH = "hybridtrt.replace_each"  # one U+FFFD for each byte; "replace": one for a character that breaks off


class TokenTexts(dict[int, str | None]):
    """The text of tokens whose bytes are whole characters, None of others, looked up as they are needed."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__()
        self._bytes = token_bytes

    def __missing__(self, token: int) -> str | None:
        data = self._bytes[token]
        text, length = codecs.utf_8_decode(data, self._bytes.errors, False)
        self[token] = text if length == len(data) else None
        return self[token]


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, looked up as they are needed.

    Special tokens and ids that the tokenizer does not know have none. `leading` is taken off where a text begins with
    it; `errors` is how bytes that are not UTF-8 are decoded. `texts` are those of tokens by themselves.
    """

    def __init__(
        self, name: Callable[[int], str | None], read: Callable[[str], bytes], leading: str, errors: str
    ) -> None:
        super().__init__()
        self._name = name
        self._read = read
        self.leading = leading
        self.errors = errors
        self.texts = TokenTexts(self)

    def __missing__(self, token: int) -> bytes:
        name = self._name(token)
        self[token] = b"" if name is None else self._read(name)
        return self[token]


def token_bytes(backend: Any, special_ids: Collection[int]) -> TokenBytes | None:
    """The table of a tokenizer of the tokenizers library that is byte-level (GPT-2, Qwen, Llama 3) or falls back to
    bytes (Llama 2, Jamba, Gemma); None for others.
    """
    match json.loads(backend.decoder.__getstate__()) if backend.decoder else None:
        case {"type": "ByteLevel"}:
            table = TokenBytes(backend.id_to_token, _byte_level, "", "replace")
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": old}, "content": new},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        } if strip in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
            table = TokenBytes(
                backend.id_to_token,
                lambda name: _byte_fallback(name.replace(old, new)),
                " " if strip else "",
                REPLACE_EACH,
            )
        case _:
            return None
    table.update(dict.fromkeys(special_ids, b""))
    return table


def _byte_level(name: str) -> bytes:
    try:
        return bytes(map(CHAR_BYTES.__getitem__, name))
    except KeyError:  # an added token
        return name.encode()


def _byte_fallback(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    return name.encode()


def _char_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own characters, the others come after the 256th."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return BROKEN * (error.end - error.start), error.end


CHAR_BYTES = _char_bytes()
codecs.register_error(REPLACE_EACH, _replace_each)
