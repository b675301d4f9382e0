#!/usr/bin/env python3
"""Make a small hybrid checkpoint with random weights and a real byte-level BPE tokenizer, as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
HIDDEN = 256
SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3_next": {
        "num_hidden_layers": 8,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 192,
    },
    "jamba": {
        "num_hidden_layers": 8,
        "intermediate_size": 512,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
        "intermediate_size": 192,
        "shared_intermediate_size": 384,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_chunk_size": 64,
        "attention_multiplier": 0.125,
        "tie_word_embeddings": True,
    },
}


def sources() -> Iterator[str]:
    """Text to train the tokenizer on: the standard library of this Python."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = (
        "{% for m in messages %}{{ '<|bos|>' + m['role'] + '\\n' + m['content'] + '<|eos|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|bos|>assistant\\n' }}{% endif %}"
    )
    return fast


def make_checkpoint(folder: Path, family: str, seed: int = 0) -> int:
    """Write the folder and return the number of parameters."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_next")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    parameters = make_checkpoint(args.output, args.family, args.seed)
    print(f"{args.output}: {args.family}, {parameters:,} random parameters, {VOCAB} tokens")


if __name__ == "__main__":
    main()
