"""LFM2 with experts: after some dense layers, experts chosen by the sigmoids of their logits plus a bias.

Facts from transformers' `Lfm2MoeConfig` and its modelling code; `layer_types` has no default.
"""

from __future__ import annotations

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families.lfm2 import DECODER, LAYER_TYPES, MLP_NAMES, mixer_sources, read_lfm2
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import experts
from hybridtrt.converters.mixers import Mixer
from hybridtrt.converters.sources import Named, Sources


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=LAYER_TYPES)
    if pattern is None:
        raise hf.error("layer_types", "a list of layer types")
    count = hf.layer_count(32, pattern)
    dense = hf.integer("num_dense_layers", 2, minimum=0)
    mlp = MlpConfig(hf.integer("intermediate_size", 7168))
    moe = MoeConfig(
        num_experts=hf.integer("num_experts", 32, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 4),
        intermediate=hf.integer("moe_intermediate_size", 1792),
        router=RouterConfig(
            "sigmoid",
            renormalize=hf.flag("norm_topk_prob", True),
            renormalize_eps=1e-6,
            scaling=hf.number("routed_scaling_factor", 1.0),
            selection_bias=hf.flag("use_expert_bias", True),
        ),
    )
    return read_lfm2(hf, "lfm2_moe", 2048, pattern, tuple(mlp if i < dense else moe for i in range(count)))


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    if not isinstance(branch, MoeConfig):
        return mixer_sources(prefix, branch)
    return {
        "router.weight": Named(f"{prefix}.feed_forward.gate.weight"),
        "router.selection_bias": Named(f"{prefix}.feed_forward.expert_bias"),
        **experts(f"{prefix}.feed_forward.experts", branch, MLP_NAMES),
    }


FAMILY = Family(
    model_types=("lfm2_moe",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
