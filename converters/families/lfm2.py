"""LFM2: gated short convolutions and attention with norms on q and k.

Facts from transformers' `Lfm2Config` and its modelling code: the MLP's width is computed from `intermediate_size`
unless `block_auto_adjust_ff_dim` is false; `block_ff_dim` and `tie_embedding` are older names that take precedence.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_mlp, short_conv
from hybridtrt.converters.mixers import AttentionConfig, Mixer, ShortConvConfig
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

LAYER_TYPES = ("conv", "full_attention")
DECODER = Decoder(pre_norms=("operator_norm.weight", "ffn_norm.weight"), final_norm="model.embedding_norm.weight")
MLP_NAMES = ("w1", "w3", "w2")


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=LAYER_TYPES)
    count = hf.layer_count(32, pattern)
    if pattern is None:
        full = range(count) if hf.values.get("full_attn_idxs") is None else hf.integers("full_attn_idxs")
        pattern = tuple("full_attention" if i in full else "conv" for i in range(count))
    mlp = MlpConfig(_width(hf))
    return read_lfm2(hf, "lfm2", 2560, pattern, (mlp,) * count)


def read_lfm2(
    hf: HFConfig, name: str, hidden_default: int, pattern: tuple[str, ...], ffns: tuple[Ffn, ...]
) -> ModelConfig:
    """What LFM2 and its mixture of experts have in common: all but the feed-forward blocks."""
    hidden = hf.integer("hidden_size", hidden_default)
    heads = hf.integer("num_attention_heads", 32)
    head_dim = hf.head_dim(hidden, heads)
    vocab_size = hf.integer("vocab_size", 65536)
    positions = hf.integer("max_position_embeddings", 128000)
    mixers: dict[str, Mixer] = {
        "full_attention": AttentionConfig(
            num_heads=heads,
            num_kv_heads=hf.integer("num_key_value_heads", 8),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qk_norm="head",
            rope=0,
        ),
        "conv": ShortConvConfig(hidden, hf.integer("conv_L_cache", 3, minimum=2), hf.flag("conv_bias", False)),
    }
    tied = "tie_embedding" if "tie_embedding" in hf.values else "tie_word_embeddings"
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("norm_eps", 1e-5, positive=True),
        layers=tuple(
            LayerConfig((Block((mixers[kind],)), Block((ffn,)))) for kind, ffn in zip(pattern, ffns, strict=True)
        ),
        ropes=(read_rope(hf, head_dim, max_positions=positions, theta=1e6),),
        tie_word_embeddings=hf.flag(tied, True),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _width(hf: HFConfig) -> int:
    """Two thirds of the stated width, times a multiplier, rounded up to a multiple."""
    key = "block_ff_dim" if "block_ff_dim" in hf.values else "intermediate_size"
    width = hf.integer(key, 12288)
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return width
    scaled = hf.number("block_ffn_dim_multiplier", 1.0, positive=True) * int(2 * width / 3)
    if not 1 <= scaled < 2**31:
        raise hf.error("block_ffn_dim_multiplier", f"one that keeps two thirds of {key}={width} in 1..2^31")
    multiple = hf.integer("block_multiple_of", 256)
    return -(-int(scaled) // multiple) * multiple


def mixer_sources(prefix: str, branch: Mixer | Ffn) -> Sources:
    """Names of the mixers and of the dense MLP."""
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch, out="out_proj", qk_norms=("q_layernorm", "k_layernorm"))
        case ShortConvConfig():
            return short_conv(f"{prefix}.conv")
        case _:
            return gated_mlp(f"{prefix}.feed_forward", names=MLP_NAMES)


FAMILY = Family(
    model_types=("lfm2",),
    config=_config,
    sources=lambda config: DECODER.sources(config, mixer_sources),
    ignored=("*.rotary_emb.inv_freq",),
)
