"""The tokenizer of an engine folder: text and chat messages to token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrt.build.engine import TOKENIZER
from hybridtrt.build.stored_tokenizer import StoredTokenizer
from hybridtrt.runtime.token_bytes import token_bytes

if TYPE_CHECKING:
    from hybridtrt.runtime.chat_template import ChatTemplate


class Tokenizer:
    """A stored tokenizer at work. Threads may share it.

    `decode` skips special tokens, whose ids are `special_ids`. `backend` is the fast tokenizer that decodes, or None
    where its text is cleaned up, and `token_bytes` the bytes of its tokens where they are the text, or None.
    """

    def __init__(self, stored: StoredTokenizer) -> None:
        settings = stored.settings
        self._tokenizer, self._settings = stored.backend, settings
        self.special_ids = frozenset(settings.special_ids)
        self.bos_token_id = settings.bos_token_id
        self.backend: Any = None if settings.clean_up_spaces else stored.backend
        self.token_bytes = None if self.backend is None else token_bytes(self.backend, self.special_ids)

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt with the special tokens that it adds; BOS once, also when the text brings it.

        Raises `ValueError` for text that is not valid UTF-8.
        """
        ids = self._tokenizer.encode(valid_text(text), add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        return tuple(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids)

    def encode_messages(self, messages: str | bytes | Sequence[Any]) -> tuple[int, ...]:
        """Token ids of a conversation through the chat template, ready for the assistant's answer.

        `messages` is a list of `{"role": ..., "content": ...}`, or such a list as JSON. Raises `ValueError` when it is
        not, or when the tokenizer has no chat template or the template refuses it.
        """
        if not self._settings.chat_template:
            raise ValueError("messages need a chat template, and the tokenizer has none; send the text instead")
        conversation = _conversation(messages)
        try:
            text = self._chat_template.render(conversation)
        except Exception as error:
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from None
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return cleaned_up(text) if self._settings.clean_up_spaces else text

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        from hybridtrt.runtime.chat_template import ChatTemplate  # here, so that only messages bring Jinja along

        return ChatTemplate(self._settings.chat_template or "", self._settings.special_tokens)


def load_tokenizer(engine: str | Path) -> Tokenizer | None:
    """The tokenizer in `<engine>/tokenizer`, or None when there is no such folder: then only token ids are served.

    Raises `ValueError` when the folder holds no tokenizer that can be read.
    """
    folder = Path(engine) / TOKENIZER
    return Tokenizer(StoredTokenizer.load(folder)) if folder.is_dir() else None


def cleaned_up(text: str) -> str:
    """The text without the spaces that tokenizers of words put before punctuation, as transformers takes them out."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced.strip())
    return text


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
