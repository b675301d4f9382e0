"""Ling 3 (`bailing_hybrid`): Kimi Delta Attention and latent attention with a gate a head, experts in groups.

Facts from transformers' `BailingHybridConfig` and its modelling code: `head_dim` is that of the linear attention, but
transformers saves the rotary width in its place and the true one as `linear_head_dim`; the log decay of a token lies
above `kda_lower_bound` if `kda_safe_gate`. On the hub many names differ, and layers for multi-token prediction follow.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families.kimi_linear import KINDS, read_layers, read_moe
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, experts, gated_mlp, kda
from hybridtrt.converters.mixers import KdaConfig, Mixer, MlaConfig
from hybridtrt.converters.mla import mla_sources, read_mla
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Named, Sources, either

DECODER = Decoder()
HUB = Decoder(embedding="model.word_embeddings.weight")


def _config(hf: HFConfig) -> ModelConfig:
    hf.choice("score_function", "sigmoid", ("sigmoid",))
    pattern = hf.layer_pattern("layer_types", allowed=KINDS)
    count = hf.layer_count(42, pattern)
    if pattern is None:
        group = hf.integer("layer_group_size", 6)
        pattern = tuple(KINDS[(i + 1) % group == 0] for i in range(count))
    full = replace(read_mla(hf, kv_heads=32), head_gate=True)
    mixers: dict[str, Mixer] = {"linear_attention": _linear(hf, full.num_heads), "full_attention": full}
    vocab_size = hf.integer("vocab_size", 157184)
    positions = hf.integer(hf.spelled("model_max_length", "max_position_embeddings"), 262144)
    return ModelConfig(
        architecture="bailing_hybrid",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 2560),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=read_layers(
            hf,
            [mixers[kind] for kind in pattern],
            dense=2,
            mlp=MlpConfig(hf.integer("intermediate_size", 6144), hf.choice("hidden_act", "silu", ("silu",))),
            moe=read_moe(hf, experts=512, intermediate=768, scaling=2.5, groups=(8, 4)),
        ),
        ropes=(read_rope(hf, full.rope_dim, max_positions=positions, theta=6e6),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 156895, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 156892, vocab_size=vocab_size),
    )


def _linear(hf: HFConfig, heads: int) -> KdaConfig:
    bound = hf.number("kda_lower_bound", -5.0)
    if bound >= 0:
        raise hf.error("kda_lower_bound", "a number below 0")
    return KdaConfig(
        num_heads=hf.integer("linear_num_heads", heads),
        head_dim=hf.integer(hf.spelled("linear_head_dim", "head_dim"), 128),
        conv_width=hf.integer(hf.spelled("linear_conv_kernel_dim", "short_conv_kernel_size"), 4, minimum=2),
        decay_bound=bound if hf.flag("kda_safe_gate", True) else None,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
    match branch:
        case MlaConfig():
            return mla_sources(attention, branch)
        case KdaConfig():
            return kda(attention, branch, "forget_gate.")
        case MoeConfig():
            return {
                "router.weight": Named(f"{ffn}.gate.weight"),
                "router.selection_bias": Named(f"{ffn}.gate.e_score_correction_bias"),
                **experts(f"{ffn}.experts", branch),
                **gated_mlp(f"{ffn}.shared_experts", "shared."),
            }
        case _:
            return gated_mlp(ffn)


def _hub_branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    attention = f"{prefix}.attention"
    match branch:
        case MlaConfig():
            dense = {f"dense.{part}": Named(f"{attention}.dense.{part}") for part in ("weight", "bias")}
            return mla_sources(attention, branch) | dense
        case KdaConfig():
            return kda(attention, branch, out="dense")
        case MoeConfig():
            return _branch(prefix, branch) | {"router.selection_bias": Named(f"{prefix}.mlp.gate.expert_bias")}
        case _:
            return _branch(prefix, branch)


FAMILY = Family(
    model_types=("bailing_hybrid",),
    config=_config,
    sources=lambda config: either(HUB.sources(config, _hub_branch), DECODER.sources(config, _branch)),
    ignored=("*.rotary_emb.inv_freq",),
    prediction_layers=("num_nextn_predict_layers", "num_mtp_layers"),
)
