"""Small real tokenizers: byte-level BPE (GPT-2, Qwen, Granite) and byte fallback (Llama, Jamba)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hybridtrt.build.stored_tokenizer import StoredTokenizer

CORPUS = (
    "the quick brown fox jumps over the lazy dog, and then again; it's a test of spaces  and   tabs\tand\nlines ",
    "日本語のテキスト 你好世界 привет мир héllo wörld 😀😃🎉 👩‍👩‍👧 naïve café ﷽ ",
)
SPECIALS = ("<s>", "</s>", "<|user|>")


@cache
def byte_level() -> Tokenizer:
    """Its merges go across characters, so tokens may end inside one: " 😀" is cut after the third byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Words begin with ▁, unknown characters are bytes, and a space before the first word is dropped."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=[],
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator([CORPUS[0]] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Words begin with ▁ and unknown characters have no text: it has no bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator([CORPUS[0]] * 3, trainer)
    return tokenizer


def token_bytes(backend: Tokenizer, token: str) -> bytes:
    """What one token stands for, by the published tables of byte-level BPE and byte fallback."""
    if "ByteFallback" in str(backend.decoder):
        return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[char] for char in token)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that puts <s> before every text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", copy.token_to_id("<s>"))])
    return copy


def wrapped(tokenizer: Tokenizer, **options: Any) -> Any:
    """The tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|user|>"], **options
    )


def kept(tokenizer: Tokenizer, chat_template: str | dict[str, str] | None = None, **options: Any) -> StoredTokenizer:
    """The tokenizer as an engine keeps it."""
    from hybridtrt.build.hf_tokenizer import stored

    return stored(wrapped(tokenizer, chat_template=chat_template, **options))
