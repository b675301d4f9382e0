"""Qwen3.5, dense and with experts, and the text part of its vision-language models.

Facts from transformers' `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig` and their modelling code: the layers are those of
Qwen3-Next, but the projections of the gated delta rule are stored one by one in blocks, and either all layers have
experts, whose weights are always renormalised, or none. Positions of text are the same in all sections of its rotary
table.
"""

from __future__ import annotations

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families.qwen3_next import DECODER, other_branch, read_mixers, read_model
from hybridtrt.converters.family import TEXT_NESTINGS, Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import gated_delta
from hybridtrt.converters.mixers import GatedDeltaConfig, Mixer
from hybridtrt.converters.sources import Sources

WRAPPERS = ("qwen3_5", "qwen3_5_moe")
IN_PROJ = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _config(hf: HFConfig) -> ModelConfig:
    experts = str(hf.values.get("model_type")).startswith("qwen3_5_moe")
    text = hf.text(*WRAPPERS)
    activation = text.choice("hidden_act", "silu", ("silu",))
    if experts:
        mixers = read_mixers(text, 40, kv_heads=2)
        ffn: Ffn = _moe(text, activation)
    else:
        mixers = read_mixers(text, 32, kv_heads=4)
        ffn = MlpConfig(text.integer("intermediate_size", 12288), activation)
    name = "qwen3_5_moe" if experts else "qwen3_5"
    return read_model(name, text, mixers, [ffn] * len(mixers), vocab_size=248320, hidden=2048 if experts else 4096)


def _moe(hf: HFConfig, activation: str) -> MoeConfig:
    return MoeConfig(
        num_experts=hf.integer("num_experts", 256, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 8),
        intermediate=hf.integer("moe_intermediate_size", 512),
        router=RouterConfig("softmax", renormalize=True),
        activation=activation,
        shared_intermediate=hf.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    if isinstance(branch, GatedDeltaConfig):
        return gated_delta(f"{prefix}.linear_attn", branch, IN_PROJ)
    return other_branch(prefix, branch)


FAMILY = Family(
    model_types=(*WRAPPERS, "qwen3_5_moe_text", "qwen3_5_text"),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("model.visual.*", "mtp.*", "*.rotary_emb.inv_freq"),  # mtp: layers for multi-token prediction
    nestings=TEXT_NESTINGS,
)
