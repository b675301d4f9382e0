"""Zamba: Mamba with several heads, and one transformer block whose weights several layers use.

Facts from transformers' `ZambaConfig` and its modelling code: the block reads the layer's input beside the embeddings,
its scores are scaled as if heads were half as wide, and Mamba's input projection interleaves x and z.
"""

from __future__ import annotations

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.hybrid_layers import HybridLayout, hybrid_layers, nested, transformer_norms
from hybridtrt.converters.layouts import attention, gated_mlp, mamba1
from hybridtrt.converters.mamba_keys import dt_rank
from hybridtrt.converters.mixers import AttentionConfig, Mamba1Config, Mixer, SharedTransformerConfig
from hybridtrt.converters.padding import BlockDiagonal
from hybridtrt.converters.sources import Deinterleave, Reshaped, Sources


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layers_block_type", "layer_types", allowed=("linear_attention", "hybrid"))
    count = hf.layer_count(76, pattern)
    if pattern is None:
        pattern = _default_pattern(hf, count)
    hidden = hf.integer("hidden_size", 3712)
    tied = hf.flag("tie_word_embeddings", True)
    vocab_size = hf.integer("vocab_size", 32000)
    return ModelConfig(
        architecture="zamba",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=hf.integer("max_position_embeddings", 4096),
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=hybrid_layers(pattern, _mamba(hf, hidden), _transformer(hf, hidden), 1 if tied else None),
        tie_word_embeddings=tied,
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _default_pattern(hf: HFConfig, count: int) -> tuple[str, ...]:
    period = hf.integer("attn_layer_period", 6)
    offset = hf.integer("attn_layer_offset", 4, minimum=0)
    if count < 3:
        raise hf.error("num_hidden_layers", "at least 3, as layers_block_type is absent")
    first = ("linear_attention", "linear_attention", "hybrid")
    return first + tuple("hybrid" if i % period == offset else "linear_attention" for i in range(count - 3))


def _transformer(hf: HFConfig, hidden: int) -> SharedTransformerConfig:
    if hf.values.get("attention_hidden_size") not in (None, 0, 2 * hidden):
        raise hf.error("attention_hidden_size", f"{2 * hidden}, twice the hidden size")
    heads = hf.integer("num_attention_heads", 16)
    key = "head_dim" if "head_dim" in hf.values else "attention_head_dim"
    head_dim = hf.integer(key, 2 * hidden // heads, nullable=True, minimum=0) or 2 * hidden // heads
    full = AttentionConfig(heads, hf.integer("num_key_value_heads", 16), head_dim, scale=(head_dim / 2) ** -0.5)
    activation = hf.choice("hidden_act", "gelu", ("gelu", "silu"))
    return SharedTransformerConfig(0, full, MlpConfig(hf.integer("intermediate_size", 14848), activation))


def _mamba(hf: HFConfig, hidden: int) -> Mamba1Config:
    hf.choice("hidden_mamba_act", "silu", ("silu",))
    return Mamba1Config(
        inner=hf.integer("mamba_expand", 2) * hidden,
        d_state=hf.integer("mamba_d_state", 16),
        dt_rank=dt_rank(hf, "mamba_dt_rank", hidden),
        conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=hf.flag("mamba_conv_bias", True),
        proj_bias=hf.flag("mamba_proj_bias", False),
        num_heads=hf.integer("n_mamba_heads", 2),
    )


def _mamba_sources(prefix: str, mixer: Mixer) -> Sources:
    assert isinstance(mixer, Mamba1Config)
    heads, inner, state = mixer.num_heads, mixer.inner, mixer.d_state
    head_dim = inner // heads
    return mamba1(prefix) | {
        "in_proj.weight": Deinterleave(f"{prefix}.in_proj.weight", inner, (1, 1)),
        "in_proj.bias": Deinterleave(f"{prefix}.in_proj.bias", inner, (1, 1)),
        "x_proj.weight": BlockDiagonal(f"{prefix}.x_proj_weight", heads, (mixer.dt_rank, state, state)),
        "dt_proj.weight": BlockDiagonal(f"{prefix}.dt_proj_weight", heads, (head_dim,)),
        "dt_bias": Reshaped(f"{prefix}.dt_proj_bias", (heads, head_dim)),
        "A_log": Reshaped(f"{prefix}.A_log", (heads, head_dim, state)),
        "D": Reshaped(f"{prefix}.D", (heads, head_dim)),
    }


def _transformer_sources(prefix: str, config: SharedTransformerConfig) -> Sources:
    return (
        transformer_norms(prefix)
        | nested("attention", attention(f"{prefix}.self_attn", config.attention))
        | nested("mlp", gated_mlp(f"{prefix}.feed_forward"))
    )


LAYOUT = HybridLayout("shared_transf", _mamba_sources, _transformer_sources)
FAMILY = Family(model_types=("zamba",), config=_config, sources=LAYOUT.sources)
