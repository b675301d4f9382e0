"""DeepSeek-V2: latent attention, dense layers first, then experts beside shared ones, chosen by softmax scores.

Facts from transformers' `DeepseekV2Config` and its modelling code, which does not renormalise the chosen weights.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, experts, gated_mlp
from hybridtrt.converters.mixers import Mixer, MlaConfig
from hybridtrt.converters.mla import mla_sources, read_mla
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Named, Sources

DECODER = Decoder()


def _config(hf: HFConfig) -> ModelConfig:
    count = hf.layer_count(32, None)
    dense = hf.integer("first_k_dense_replace", 0, minimum=0)
    vocab_size = hf.integer("vocab_size", 102400)
    positions = hf.integer("max_position_embeddings", 2048)
    mixer = read_mla(hf, q_rank=1536)
    activation = hf.choice("hidden_act", "silu", ("silu",))
    mlp_bias = hf.flag("mlp_bias", False)
    mlp = MlpConfig(hf.integer("intermediate_size", 11008), activation, bias=mlp_bias)
    moe = _moe(hf, activation, mlp_bias)
    return ModelConfig(
        architecture="deepseek_v2",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 4096),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(LayerConfig((Block((mixer,)), Block((mlp if i < dense else moe,)))) for i in range(count)),
        ropes=(read_rope(hf, mixer.rope_dim, max_positions=positions),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _moe(hf: HFConfig, activation: str, bias: bool) -> MoeConfig:
    intermediate = hf.integer("moe_intermediate_size", 1407)
    if hf.values.get("norm_topk_prob") not in (None, False):
        raise hf.error("norm_topk_prob", "false")
    router = RouterConfig("softmax", scaling=hf.number("routed_scaling_factor", 1.0))
    if hf.choice("topk_method", "greedy", ("greedy", "group_limited_greedy")) != "greedy":
        groups, top_groups = hf.integer("n_group"), hf.integer("topk_group")
        router = replace(router, num_groups=groups, top_groups=top_groups, group_score="max")
    return MoeConfig(
        num_experts=hf.integer("n_routed_experts", 64, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate=intermediate,
        router=router,
        activation=activation,
        shared_intermediate=hf.integer("n_shared_experts", 2) * intermediate,
        bias=bias,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case MlaConfig():
            return mla_sources(f"{prefix}.self_attn", branch)
        case MoeConfig():
            return {
                "router.weight": Named(f"{prefix}.mlp.gate.weight"),
                **experts(f"{prefix}.mlp.experts", branch),
                **gated_mlp(f"{prefix}.mlp.shared_experts", "shared."),
            }
        case _:
            return gated_mlp(f"{prefix}.mlp")


FAMILY = Family(
    model_types=("deepseek_v2",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
