"""DeepSeek-V3: latent attention, dense layers first, then experts chosen in groups by sigmoid scores with a bias.

Facts from transformers' `DeepseekV3Config` and its modelling code.
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
    count = hf.layer_count(61, None)
    dense = hf.integer("first_k_dense_replace", 3, minimum=0)
    vocab_size = hf.integer("vocab_size", 129280)
    positions = hf.integer("max_position_embeddings", 4096)
    pairs = hf.values.get("rope_interleave", True) is not None and hf.flag("rope_interleave", True)
    mixer = replace(read_mla(hf, heads=128, kv_heads=128, q_rank=1536), interleaved=pairs)
    activation = hf.choice("hidden_act", "silu", ("silu",))
    mlp = MlpConfig(hf.integer("intermediate_size", 18432), activation)
    moe = _moe(hf, activation)
    return ModelConfig(
        architecture="deepseek_v3",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 7168),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(LayerConfig((Block((mixer,)), Block((mlp if i < dense else moe,)))) for i in range(count)),
        ropes=(read_rope(hf, mixer.rope_dim, max_positions=positions),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 0, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 1, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _moe(hf: HFConfig, activation: str) -> MoeConfig:
    intermediate = hf.integer("moe_intermediate_size", 2048)
    renormalize = hf.values.get("norm_topk_prob", True) is not None and hf.flag("norm_topk_prob", True)
    return MoeConfig(
        num_experts=hf.integer("n_routed_experts", 256, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 8),
        intermediate=intermediate,
        router=RouterConfig(
            "sigmoid",
            renormalize=renormalize,
            renormalize_eps=1e-20 if renormalize else 0.0,
            scaling=hf.number("routed_scaling_factor", 2.5),
            selection_bias=True,
            num_groups=hf.integer("n_group", 8),
            top_groups=hf.integer("topk_group", 4),
        ),
        activation=activation,
        shared_intermediate=hf.integer("n_shared_experts", 1) * intermediate,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case MlaConfig():
            return mla_sources(f"{prefix}.self_attn", branch, branch.interleaved)
        case MoeConfig():
            return {
                "router.weight": Named(f"{prefix}.mlp.gate.weight"),
                "router.selection_bias": Named(f"{prefix}.mlp.gate.e_score_correction_bias"),
                **experts(f"{prefix}.mlp.experts", branch),
                **gated_mlp(f"{prefix}.mlp.shared_experts", "shared."),
            }
        case _:
            return gated_mlp(f"{prefix}.mlp")


FAMILY = Family(
    model_types=("deepseek_v3",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("model.layers.61.*", "*.rotary_emb.inv_freq"),  # 61: a layer for multi-token prediction
)
