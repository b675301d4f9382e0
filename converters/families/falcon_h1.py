"""Falcon-H1: attention and Mamba-2 in parallel on one norm in every layer, and a multiplier almost everywhere.

Facts from transformers' `FalconH1Config` and its modelling code: without `mamba_rms_norm` the output of Mamba-2
is only gated; the biases of its two projections are two switches.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_mlp, mamba2
from hybridtrt.converters.mamba_keys import read_mamba2
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

DECODER = Decoder(
    pre_norms=("input_layernorm.weight", "pre_ff_layernorm.weight"), final_norm="model.final_layernorm.weight"
)


def _config(hf: HFConfig) -> ModelConfig:
    count = hf.layer_count(32, None)
    hidden = hf.integer("hidden_size", 4096)
    vocab_size = hf.integer("vocab_size", 128000)
    positions = hf.integer("max_position_embeddings", 8192)
    full = _attention(hf, hidden)
    parallel = Block(
        (full, _mamba(hf, hidden)),
        in_multipliers=(hf.number("attention_in_multiplier", 1.0), hf.number("ssm_in_multiplier", 1.0)),
        out_multipliers=(hf.number("attention_out_multiplier", 1.0), hf.number("ssm_out_multiplier", 1.0)),
    )
    layer = LayerConfig((parallel, Block((_mlp(hf),))))
    return ModelConfig(
        architecture="falcon_h1",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=(layer,) * count,
        ropes=(read_rope(hf, full.head_dim, max_positions=positions),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        logits_multiplier=hf.number("lm_head_multiplier", 1.0),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _attention(hf: HFConfig, hidden: int) -> AttentionConfig:
    heads = hf.integer("num_attention_heads", 32)
    kv_heads = heads if hf.values.get("num_key_value_heads", 8) is None else hf.integer("num_key_value_heads", 8)
    head_dim = hf.head_dim(hidden, heads)
    bias = hf.flag("attention_bias", False)
    scale = head_dim**-0.5 * hf.number("key_multiplier", 1.0)
    return AttentionConfig(heads, kv_heads, head_dim, scale=scale, bias=bias, dense_bias=bias, rope=0)


def _mamba(hf: HFConfig, hidden: int) -> Mamba2Config:
    inner, keys = hf.integer("mamba_expand", 2) * hidden, "mamba_expand * hidden_size"
    if hf.values.get("mamba_d_ssm", 1024) is not None:
        inner, keys = hf.integer("mamba_d_ssm", 1024), "mamba_d_ssm"
    config = read_mamba2(hf, inner, keys)
    before_gate = hf.flag("mamba_norm_before_gate", True)
    normed = hf.flag("mamba_rms_norm", False)
    return replace(
        config,
        out_bias=hf.flag("projectors_bias", False),
        norm=("before_gate" if before_gate else "gated") if normed else "none",
        norm_groups=config.n_groups if normed else 1,
        multipliers=_multipliers(hf, "ssm_multipliers", 5),
    )


def _mlp(hf: HFConfig) -> MlpConfig:
    gate, down = _multipliers(hf, "mlp_multipliers", 2)
    return MlpConfig(
        hf.integer("intermediate_size", 14336),
        hf.choice("hidden_act", "silu", ("silu",)),
        bias=hf.flag("mlp_bias", False),
        gate_multiplier=gate,
        down_multiplier=down,
    )


def _multipliers(hf: HFConfig, name: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if hf.values.get(name) is None else hf.numbers(name, count)


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case Mamba2Config():
            return mamba2(f"{prefix}.mamba", branch)
        case _:
            return gated_mlp(f"{prefix}.feed_forward")


FAMILY = Family(
    model_types=("falcon_h1",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq", "*.mamba.mup_vector"),
)
