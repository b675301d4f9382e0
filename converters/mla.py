"""Multi-head latent attention as DeepSeek and its descendants describe it: keys of the config, names of weights."""

from __future__ import annotations

import math

from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.mixers import MlaConfig
from hybridtrt.converters.rope import yarn_mscale
from hybridtrt.converters.sources import Deinterleave, Named, Source, Sources, SplitRotary


def read_mla(
    hf: HFConfig, *, heads: int = 32, kv_heads: int | None = None, q_rank: int | None = None, rope: int | None = 0
) -> MlaConfig:
    """The mixer of a config; `heads`, `kv_heads` (None: all heads) and `q_rank` are the defaults of the class.

    Where the rotary table is scaled and `mscale_all_dim` named, the scores are scaled too. Raises `ValueError` for
    values that do not fit.
    """
    heads = hf.integer("num_attention_heads", heads)
    kv_heads = _optional(hf, "num_key_value_heads", kv_heads)
    if kv_heads not in (None, heads):
        raise hf.error("num_key_value_heads", f"num_attention_heads={heads}")
    nope_dim = hf.integer("qk_nope_head_dim", 128)
    rope_dim = hf.integer("qk_rope_head_dim", 64)
    bias = hf.flag("attention_bias", False)
    return MlaConfig(
        num_heads=heads,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=hf.integer("v_head_dim", 128),
        kv_rank=hf.integer("kv_lora_rank", 512),
        scale=(nope_dim + rope_dim) ** -0.5 * (1.0 if rope is None else _score_scale(hf)),
        q_rank=_optional(hf, "q_lora_rank", q_rank),
        bias=bias,
        dense_bias=bias,
        rope=rope,
    )


def mla_sources(prefix: str, config: MlaConfig, interleaved: bool = True) -> Sources:
    """The names of DeepSeek; `interleaved` rotary channels are those that turn in neighbouring pairs."""
    heads, nope_dim, rope_dim = config.num_heads, config.nope_dim, config.rope_dim

    def query(name: str) -> Source:
        if interleaved:
            return SplitRotary(name, heads, rope_dim)
        return Deinterleave(name, heads, (nope_dim, rope_dim))

    sources: Sources = {
        "q.weight": query(f"{prefix}.q_proj.weight"),
        "q_norm.weight": Named(f"{prefix}.q_a_layernorm.weight"),
        "q_up.weight": query(f"{prefix}.q_b_proj.weight"),
        "kv_norm.weight": Named(f"{prefix}.kv_a_layernorm.weight"),
        "kv_up.weight": Named(f"{prefix}.kv_b_proj.weight"),
        "head_gate.weight": Named(f"{prefix}.g_proj.weight"),
    }
    for part in ("weight", "bias"):
        name = f"{prefix}.kv_a_proj_with_mqa.{part}"
        sources[f"q_down.{part}"] = Named(f"{prefix}.q_a_proj.{part}")
        sources[f"kv_down.{part}"] = SplitRotary(name, 1, rope_dim) if interleaved else Named(name)
        sources[f"dense.{part}"] = Named(f"{prefix}.o_proj.{part}")
    return sources


def _optional(hf: HFConfig, name: str, default: int | None) -> int | None:
    """An integer; null is none, and absent the default, which may be none too."""
    return None if hf.values.get(name, default) is None else hf.integer(name, default)


def _score_scale(hf: HFConfig) -> float:
    section = hf.section("rope_scaling", "rope_parameters")
    kind = section.values.get("rope_type", section.values.get("type", "default"))
    if kind == "default" or not section.values.get("mscale_all_dim"):
        return 1.0
    mscale = yarn_mscale(section.number("factor"), section.number("mscale_all_dim"))
    if not math.isfinite(mscale * mscale):
        raise section.error("mscale_all_dim", "one that gives a finite scale")
    return mscale * mscale
