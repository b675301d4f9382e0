"""The tokenizer of an engine folder: text and chat messages to token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtrt.runtime.token_bytes import token_bytes


class Tokenizer:
    """Wraps a tokenizer of transformers. Threads may share it.

    `decode` skips special tokens, whose ids are `special_ids`. `backend` is the fast tokenizer that decodes, or None,
    and `token_bytes` the bytes of its tokens where they are the text, or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = _special_ids(tokenizer)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self.backend is not None:  # settings of training, which `encode` would switch off while others decode
            self.backend.no_truncation()
            self.backend.no_padding()
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self.backend = None  # the clean-up is not a part of the fast tokenizer
        self.token_bytes = None if self.backend is None else token_bytes(self.backend, self.special_ids)

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt with the special tokens that it adds; BOS once, also when the text brings it.

        Raises `ValueError` for text that is not valid UTF-8.
        """
        return self._without_double_bos(self._tokenizer.encode(valid_text(text), add_special_tokens=add_special_tokens))

    def encode_messages(self, messages: str | bytes | Sequence[Any]) -> tuple[int, ...]:
        """Token ids of a conversation through the chat template, ready for the assistant's answer.

        `messages` is a list of `{"role": ..., "content": ...}`, or such a list as JSON. Raises `ValueError` when it is
        not, or when the tokenizer has no chat template or the template refuses it.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("messages need a chat template, and the tokenizer has none; send the text instead")
        conversation = _conversation(messages)
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from None
        return self._without_double_bos(self._tokenizer.encode(valid_text(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        if self.backend is not None:
            return str(self.backend.decode(ids, skip_special_tokens=True))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _without_double_bos(self, ids: list[int]) -> tuple[int, ...]:
        bos = self.bos_token_id
        return tuple(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids)


def load_tokenizer(engine: str | Path) -> Tokenizer | None:
    """The tokenizer in `<engine>/tokenizer`, or None when there is no such folder: then only token ids are served.

    Raises `ValueError` when the folder holds no tokenizer that can be read. Never fetches anything or runs code from
    the folder.
    """
    folder = Path(engine) / "tokenizer"
    if not folder.is_dir():
        return None
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{folder}: the tokenizer cannot be loaded: {reason[0]}") from None


def valid_text(text: str | bytes) -> str:
    """The text, when it is valid UTF-8. Raises `ValueError` otherwise, naming the place."""
    try:
        if isinstance(text, bytes):
            return text.decode("utf-8")
        text.encode("utf-8")
        return text
    except UnicodeError as error:
        raise ValueError(f"text is not valid UTF-8: {error}") from None


def _conversation(messages: str | bytes | Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)):
        try:
            messages = json.loads(valid_text(messages))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"messages are not valid JSON: {error}") from None
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError('messages must be a non-empty list of {"role": ..., "content": ...}')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'messages[{i}] must be an object with "role" (a string) and "content"')
    return list(messages)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}
