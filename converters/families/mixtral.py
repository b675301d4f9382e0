"""Mixtral: attention, in a window if the config has one, and experts whose chosen weights are renormalised.

Facts from transformers' `MixtralConfig` and its modelling code.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, mixtral_moe
from hybridtrt.converters.mixers import AttentionConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

DECODER = Decoder()


def _config(hf: HFConfig) -> ModelConfig:
    hidden = hf.integer("hidden_size", 4096)
    heads = hf.integer("num_attention_heads", 32)
    head_dim = hf.head_dim(hidden, heads, nullable=True)
    window = hf.values.get("sliding_window")
    vocab_size = hf.integer("vocab_size", 32000)
    positions = hf.integer("max_position_embeddings", 131072)
    mixer = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=0,
        window=None if window is None else hf.integer("sliding_window"),
    )
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 2),
        intermediate=hf.integer("intermediate_size", 14336),
        router=RouterConfig("softmax", renormalize=True),
        activation=hf.choice("hidden_act", "silu", ("silu",)),
    )
    return ModelConfig(
        architecture="mixtral",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=(LayerConfig((Block((mixer,)), Block((moe,)))),) * hf.layer_count(32, None),
        ropes=(read_rope(hf, head_dim, max_positions=positions, theta=1e6),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case MoeConfig():
            return mixtral_moe(prefix, branch)
        case _:
            raise TypeError(branch)


FAMILY = Family(
    model_types=("mixtral",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
