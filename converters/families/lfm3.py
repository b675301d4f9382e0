"""LFM3: short convolutions, attention in a window and full attention, each head gated, norms around every block.

Facts from transformers' `Lfm3Config` and its modelling code: each kind of attention has its own rotary table; saved
checkpoints name the gate of the heads `gate_proj`.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.families.lfm2 import MLP_NAMES
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_mlp, short_conv
from hybridtrt.converters.mixers import AttentionConfig, Mixer, ShortConvConfig
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import FirstOf, Named, Sources

DECODER = Decoder(
    pre_norms=("operator_norm.weight", "ffn_norm.weight"),
    post_norms=("post_operator_norm.weight", "post_ffn_norm.weight"),
    final_norm="model.embedding_norm.weight",
)
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=("conv", *ROPES))
    count = hf.layer_count(24, pattern)
    if pattern is None:
        pattern = tuple(
            "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
            for i in range(count)
        )
    hidden = hf.integer("hidden_size", 2048)
    vocab_size = hf.integer("vocab_size", 128000)
    positions = hf.integer("max_position_embeddings", 128000)
    head_dim = hf.integer("head_dim", 128)
    kinds = [kind for kind in ROPES if kind in pattern]
    bias = hf.flag("attention_bias", False)
    mixers: dict[str, Mixer] = {
        "conv": ShortConvConfig(hidden, hf.integer("conv_L_cache", 7, minimum=2), hf.flag("conv_bias", False))
    }
    for i, kind in enumerate(kinds):
        mixers[kind] = AttentionConfig(
            num_heads=hf.integer("num_attention_heads", 16),
            num_kv_heads=hf.integer("num_key_value_heads", 4),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            bias=bias,
            dense_bias=bias,
            qk_norm="head",
            head_gate=hf.flag("use_attention_gate", True),
            rope=i,
            window=hf.integer("sliding_window", 256) if kind == "sliding_attention" else None,
        )
    mlp = MlpConfig(hf.integer("intermediate_size", 7680))
    sandwich = hf.flag("use_sandwich_norm", True)
    return ModelConfig(
        architecture="lfm3",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("norm_eps", 1e-5, positive=True),
        layers=tuple(
            LayerConfig((Block((mixers[kind],), post_norm=sandwich), Block((mlp,), post_norm=sandwich)))
            for kind in pattern
        ),
        ropes=tuple(
            read_rope(hf, head_dim, max_positions=positions, theta=1e6, layer_type=kind, absent=ROPES) for kind in kinds
        ),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        bos_token_id=hf.token_id("bos_token_id", 124894, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 124900, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 124893, vocab_size=vocab_size),
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            gates = (Named(f"{prefix}.self_attn.{name}.weight") for name in ("gate_proj", "g_proj"))
            return attention(f"{prefix}.self_attn", branch) | {"head_gate.weight": FirstOf(tuple(gates))}
        case ShortConvConfig():
            return short_conv(f"{prefix}.conv")
        case _:
            return gated_mlp(f"{prefix}.feed_forward", names=MLP_NAMES)


FAMILY = Family(
    model_types=("lfm3",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
