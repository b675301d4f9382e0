"""Zamba2: Mamba-2, and a few transformer blocks that several layers use in turn, each use with low-rank adapters.

Facts from transformers' `Zamba2Config` and its modelling code: dt is at least `time_step_min`, as in its full forward,
while its cached steps forget that; the MLP always has adapters; `use_conv_bias` is not read; the norm of Mamba-2 has an
epsilon of 1e-5. Files repeat derived values, which must be right; those of untied models hold adapters of other uses.
"""

from __future__ import annotations

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.hybrid_layers import HybridLayout, hybrid_layers, nested, transformer_norms
from hybridtrt.converters.layouts import attention, mamba2
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config, Mixer, SharedTransformerConfig
from hybridtrt.converters.padding import PadColumns
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Concat, Named, Sources

DEFAULT_HYBRIDS = (*range(6, 43, 6), 47, 51)  # of 54 layers


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layers_block_type", "layer_types", allowed=("linear_attention", "hybrid"))
    if pattern is None:
        pattern = tuple("hybrid" if i in DEFAULT_HYBRIDS else "linear_attention" for i in range(54))
    hf.layer_count(54, pattern)
    derived = [i for i, kind in enumerate(pattern) if kind == "hybrid"]
    if hf.values.get("hybrid_layer_ids", derived) != derived:
        raise hf.error("hybrid_layer_ids", f"{derived}, the hybrid layers of the pattern")
    hidden = hf.integer("hidden_size", 2560)
    vocab_size = hf.integer("vocab_size", 32000)
    positions = hf.integer("max_position_embeddings", 4096)
    if hf.flag("use_long_context", False):
        positions = 16384
    tied = hf.flag("tie_word_embeddings", True)
    blocks = hf.integer("num_mem_blocks", 1)
    full = _attention(hf, hidden)
    rotary = full.rope is not None
    return ModelConfig(
        architecture="zamba2",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=hybrid_layers(pattern, _mamba(hf, hidden), _transformer(hf, hidden, full), blocks if tied else None),
        ropes=(read_rope(hf, full.head_dim, max_positions=positions),) if rotary else (),
        tie_word_embeddings=tied,
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _attention(hf: HFConfig, hidden: int) -> AttentionConfig:
    if hf.values.get("attention_hidden_size", 2 * hidden) != 2 * hidden:
        raise hf.error("attention_hidden_size", f"{2 * hidden}, twice the hidden size")
    heads = hf.integer("num_attention_heads", 32)
    head_dim = hf.integer("head_dim" if "head_dim" in hf.values else "attention_head_dim", 2 * hidden // heads)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", heads, nullable=True),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=0 if hf.flag("use_mem_rope", False) else None,
    )


def _transformer(hf: HFConfig, hidden: int, full: AttentionConfig) -> SharedTransformerConfig:
    adapted = hf.flag("use_shared_attention_adapter", False)
    if adapted and not 2 * hidden == full.num_heads * full.head_dim == full.num_kv_heads * full.head_dim:
        raise hf.error("use_shared_attention_adapter", "false, as q, k and v are not all twice the hidden size")
    rank = hf.integer("adapter_rank", 128)
    mlp = MlpConfig(
        hf.integer("intermediate_size", 4 * hidden, nullable=True, minimum=0) or 4 * hidden,
        hf.choice("hidden_act", "gelu", ("gelu", "silu")),
        bias=hf.flag("add_bias_linear", False),
    )
    return SharedTransformerConfig(0, full, mlp, rank if adapted else 0, rank)


def _mamba(hf: HFConfig, hidden: int) -> Mamba2Config:
    heads, inner = hf.integer("n_mamba_heads", 8), hf.integer("mamba_expand", 2) * hidden
    head_dim = hf.integer("mamba_headdim", inner // heads)
    if heads * head_dim != inner:
        raise ValueError(
            f"n_mamba_heads={heads} times {head_dim} channels is not mamba_expand * hidden_size = {inner} ({hf.source})"
        )
    groups = hf.integer("mamba_ngroups", 1)
    bias = hf.flag("add_bias_linear", False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        d_state=hf.integer("mamba_d_state", 64),
        n_groups=groups,
        conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
        in_bias=bias,
        out_bias=bias,
        dt_min=max(hf.number("time_step_min", 0.001), 0.0),
        norm_groups=groups,
        norm_eps=1e-5,
    )


def _mamba_sources(prefix: str, mixer: Mixer) -> Sources:
    assert isinstance(mixer, Mamba2Config)
    return mamba2(prefix, mixer)


def _transformer_sources(prefix: str, config: SharedTransformerConfig) -> Sources:
    mlp: Sources = {
        f"{name}.{part}": Named(f"{prefix}.feed_forward.{name}_proj.{part}")
        for name in ("gate_up", "down")
        for part in ("weight", "bias")
    }
    found = attention(f"{prefix}.self_attn", config.attention)
    return transformer_norms(prefix) | nested("attention", found) | nested("mlp", mlp)


def _adapters(prefix: str, config: SharedTransformerConfig, use: int) -> Sources:
    rank = config.attention_adapter_rank
    lists = [f"{prefix}.self_attn.linear_{name}_adapter_list.{use}" for name in ("q", "k", "v")]
    mlp = f"{prefix}.feed_forward.gate_up_proj_adapter_list.{use}"
    return {
        "attention.qkv.adapter_down.weight": Concat(tuple(Named(f"{name}.0.weight") for name in lists)),
        "attention.qkv.adapter_up.weight": Concat(
            tuple(PadColumns(f"{name}.1.weight", i * rank, (2 - i) * rank) for i, name in enumerate(lists))
        ),
        "mlp.gate_up.adapter_down.weight": Named(f"{mlp}.0.weight"),
        "mlp.gate_up.adapter_up.weight": Named(f"{mlp}.1.weight"),
    }


LAYOUT = HybridLayout("shared_transformer", _mamba_sources, _transformer_sources, _adapters)
FAMILY = Family(
    model_types=("zamba2",),
    config=_config,
    sources=LAYOUT.sources,
    ignored=("*.rotary_emb.inv_freq", "model.layers.*.shared_transformer.*_adapter_list.*"),
)
