"""Granite 4 (`granitemoehybrid`): Mamba-2 and attention, experts beside a shared MLP, and four multipliers.

Facts from transformers' `GraniteMoeHybridConfig` and its modelling code: the router takes the softmax of the top k
logits; without experts the shared MLP is the whole feed-forward block; positions are rotary only if asked for.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, granite_mlp, granite_moe, mamba2
from hybridtrt.converters.mamba_keys import read_mamba2
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

DECODER = Decoder()


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", "layers_block_type", allowed=("linear_attention", "full_attention"))
    count = hf.layer_count(32, pattern)
    hidden = hf.integer("hidden_size", 4096)
    vocab_size = hf.integer("vocab_size", 32000)
    positions = hf.integer("max_position_embeddings", 2048)
    rotary = hf.choice("position_embedding_type", "nope", ("nope", "rope"), nullable=True) == "rope"
    full = _attention(hf, hidden, rotary)
    linear = read_mamba2(hf, hf.integer("mamba_expand", 2) * hidden, "mamba_expand * hidden_size")
    mixers: dict[str, Mixer] = {"full_attention": full, "linear_attention": linear}
    ffn = _ffn(hf)
    residual = hf.number("residual_multiplier", 1.0)
    return ModelConfig(
        architecture="granitemoehybrid",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(
            LayerConfig((Block((mixers[kind],), residual), Block((ffn,), residual)))
            for kind in pattern or ("linear_attention",) * count
        ),
        ropes=(read_rope(hf, full.head_dim, max_positions=positions),) if rotary else (),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / hf.number("logits_scaling", 1.0, positive=True),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _attention(hf: HFConfig, hidden: int, rotary: bool) -> AttentionConfig:
    heads = hf.integer("num_attention_heads", 32)
    bias = hf.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", heads, nullable=True),
        head_dim=hf.head_dim(hidden, heads),
        scale=hf.number("attention_multiplier", 1.0),
        bias=bias,
        dense_bias=bias,
        rope=0 if rotary else None,
    )


def _ffn(hf: HFConfig) -> Ffn:
    activation = hf.choice("hidden_act", "silu", ("silu",))
    shared = hf.integer("shared_intermediate_size", 1024)
    num_experts = hf.integer("num_local_experts", 8, minimum=0, maximum=MAX_EXPERTS)
    if num_experts == 0:
        return MlpConfig(shared, activation)
    return MoeConfig(
        num_experts=num_experts,
        top_k=hf.integer("num_experts_per_tok", 2),
        intermediate=hf.integer("intermediate_size", 11008),
        router=RouterConfig("softmax_topk"),
        activation=activation,
        shared_intermediate=shared,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case Mamba2Config():
            return mamba2(f"{prefix}.mamba", branch)
        case MoeConfig():
            return granite_moe(prefix)
        case _:
            return granite_mlp(prefix)


FAMILY = Family(
    model_types=("granitemoehybrid",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
