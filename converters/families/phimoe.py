"""Phi-3.5-MoE: layer norms with bias, a head with bias, and two experts chosen one after another (sparsemixer).

Facts from transformers' `PhimoeConfig` and its modelling code. It chooses two experts whatever the config says.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig, RopeConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, mixtral_moe
from hybridtrt.converters.mixers import AttentionConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

DECODER = Decoder()
CHOSEN = 2


def _config(hf: HFConfig) -> ModelConfig:
    hidden = hf.integer("hidden_size", 4096)
    heads = hf.integer("num_attention_heads", 32)
    head_dim = hf.head_dim(hidden, heads)
    bias = hf.flag("attention_bias", False)
    window = hf.values.get("sliding_window")
    vocab_size = hf.integer("vocab_size", 32064)
    positions = hf.integer("max_position_embeddings", 131072)
    mixer = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        dense_bias=bias,
        rope=0,
        window=None if window is None else hf.integer("sliding_window"),
    )
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", 16, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", CHOSEN, minimum=CHOSEN, maximum=CHOSEN),
        intermediate=hf.integer("intermediate_size", 6400),
        router=RouterConfig("sparsemixer", jitter_eps=hf.number("router_jitter_noise", 0.01)),
        activation=hf.choice("hidden_act", "silu", ("silu",)),
    )
    return ModelConfig(
        architecture="phimoe",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=(LayerConfig((Block((mixer,)), Block((moe,)))),) * hf.layer_count(32, None),
        norm="layer",
        ropes=(_rope(hf, head_dim, positions),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        head_bias=hf.flag("lm_head_bias", False),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _rope(hf: HFConfig, head_dim: int, positions: int) -> RopeConfig:
    """A scaled table must name both factors of cos and sin; up to the original length the short one counts."""
    section = hf.section("rope_scaling", "rope_parameters")
    kind = section.choice("rope_type" if "rope_type" in section.values else "type", "default", ("default", "longrope"))
    if kind == "longrope":
        for name in ("short_mscale", "long_mscale"):
            section.number(name, positive=True)
    return read_rope(hf, head_dim, max_positions=positions, theta=1e6)


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case MoeConfig():
            return mixtral_moe(prefix, branch, router="router")
        case _:
            raise TypeError(branch)


FAMILY = Family(
    model_types=("phimoe",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
