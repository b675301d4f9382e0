"""The tokenizer of a Hugging Face folder, as transformers understands its files, to keep in an engine.

A class of transformers may change what `tokenizer.json` says, so the files alone do not tell how text becomes tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer

from hybridtrt.build.stored_tokenizer import StoredTokenizer, TokenizerSettings, unreadable


def read_tokenizer(folder: Path) -> StoredTokenizer:
    """Never fetches anything or runs code from the folder.

    Raises `ValueError`, one line, when it holds no tokenizer that can be read or none that the tokenizers library runs.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return stored(tokenizer)
    except Exception as error:  # transformers raises many kinds for one damaged folder
        raise unreadable(folder, error) from None


def stored(tokenizer: Any) -> StoredTokenizer:
    """What an engine keeps of a tokenizer of transformers. Raises `ValueError` for one that is not fast."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()  # settings of training
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    special |= {token for token in tokenizer.all_special_ids if token is not None}
    return StoredTokenizer(
        backend,
        TokenizerSettings(
            special_tokens=tokenizer.special_tokens_map,
            special_ids=tuple(sorted(special)),
            bos_token_id=tokenizer.bos_token_id,
            chat_template=_chat_template(tokenizer),
            split_special_tokens=tokenizer.split_special_tokens,
            clean_up_spaces=_cleans_up(tokenizer),
        ),
    )


def _chat_template(tokenizer: Any) -> str | None:
    """The template for messages without tools, of several that named "default"."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _cleans_up(tokenizer: Any) -> bool:
    """As transformers decodes: with BPE only where the files insist."""
    insists = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    is_bpe = isinstance(tokenizer.backend_tokenizer.model, BPE)
    return bool(tokenizer.clean_up_tokenization_spaces and (insists or not is_bpe))
