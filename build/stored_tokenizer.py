"""The tokenizer as an engine keeps it: what the tokenizers library runs, and what transformers adds to that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

BACKEND_FILE = "tokenizer.json"
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class TokenizerSettings:
    """`special_tokens` are those with a role (`bos_token`, ...), which chat templates read; `special_ids` all of them.

    `split_special_tokens` reads their names in a text as text; `clean_up_spaces` takes spaces from before punctuation.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    special_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    chat_template: str | None = None
    split_special_tokens: bool = False
    clean_up_spaces: bool = False


@dataclass(frozen=True)
class StoredTokenizer:
    """A fast tokenizer that neither cuts nor pads, and its settings."""

    backend: Tokenizer
    settings: TokenizerSettings

    def save(self, folder: Path) -> None:
        """Write both files into a new folder."""
        folder.mkdir()
        self.backend.save(str(folder / BACKEND_FILE), pretty=False)
        text = json.dumps(asdict(self.settings), indent=2, ensure_ascii=False)
        (folder / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> StoredTokenizer:
        """Raises `ValueError`, one line, for a folder that does not hold the two files as they were written."""
        if not (folder / SETTINGS_FILE).is_file():
            raise ValueError(f"{folder}: has no {SETTINGS_FILE}; build the engine again")
        try:
            data: dict[str, Any] = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
            settings = TokenizerSettings(**data)
            settings = replace(settings, special_ids=tuple(settings.special_ids))
            backend = Tokenizer.from_file(str(folder / BACKEND_FILE))
        except Exception as error:  # the library raises nothing more definite
            raise unreadable(folder, error) from None
        backend.encode_special_tokens = settings.split_special_tokens
        return cls(backend, settings)


def unreadable(folder: Path, error: Exception) -> ValueError:
    """One line for whatever a tokenizer's files raised."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(f"{folder}: the tokenizer cannot be loaded: {reason[0]}")
