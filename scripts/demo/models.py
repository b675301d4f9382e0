"""The tokenizer and the shapes of the demo models, as transformers has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.text import END

VOCAB_SIZE = 2048
CONTEXT = 256  # tokens of a training window
POSITIONS = 2048
LAYERS = ["linear_attention", "linear_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Recipe:
    """One demo model: its config, and how long it is trained on how many tokens a step."""

    config: transformers.PretrainedConfig
    mixers: str  # for the page
    steps: int
    batch: int = 4  # windows of CONTEXT tokens in a step
    peak_rate: float = 3e-3
    weight_decay: float = 0.1


def train_tokenizer(text: str) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with one special token, `END`, id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.replace(END, "").splitlines(keepends=True), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=POSITIONS
    )


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def recipes() -> dict[str, Recipe]:
    """The demo models by name."""
    gated_delta = transformers.Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=6,
        layer_types=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=96,
        router_aux_loss_coef=0.01,
    )
    mamba2 = transformers.GraniteMoeHybridConfig(
        **COMMON,
        num_hidden_layers=6,
        layer_types=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_multiplier=0.125,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=64,
        mamba_chunk_size=64,
        intermediate_size=96,
        shared_intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.01,
    )
    return {
        "demo-gated-delta": Recipe(gated_delta, "gated delta rule and gated attention, 8 experts", steps=3200),
        "demo-mamba2": Recipe(mamba2, "Mamba-2 and attention without positions, 8 experts", steps=2800),
    }
