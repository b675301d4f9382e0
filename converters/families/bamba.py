"""Bamba: Mamba-2 and attention with rotary positions on half of the channels, an MLP in every layer.

Facts from transformers' `BambaConfig` and its modelling code: without `attn_layer_indices` there is no attention; a
`partial_rotary_factor` at the top is not read.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_mlp, mamba2
from hybridtrt.converters.mamba_keys import read_mamba2
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

DECODER = Decoder(
    pre_norms=("input_layernorm.weight", "pre_ff_layernorm.weight"), final_norm="model.final_layernorm.weight"
)


def _config(hf: HFConfig) -> ModelConfig:
    count = hf.layer_count(32, None)
    hidden = hf.integer("hidden_size", 4096)
    vocab_size = hf.integer("vocab_size", 128000)
    positions = hf.integer("max_position_embeddings", 262144)
    activation = hf.choice("hidden_act", "silu", ("silu",))
    full = _attention(hf, hidden)
    linear = read_mamba2(hf, hf.integer("mamba_expand", 2) * hidden, "mamba_expand * hidden_size")
    ffn = MlpConfig(hf.integer("intermediate_size", 14336), activation, bias=hf.flag("mlp_bias", False))
    indices = hf.integers("attn_layer_indices")
    if not all(0 <= i < count for i in indices):
        raise hf.error("attn_layer_indices", f"layers in 0..{count - 1}")
    mixers: list[Mixer] = [full if i in indices else linear for i in range(count)]
    below = HFConfig({key: value for key, value in hf.values.items() if key != "partial_rotary_factor"}, hf.source)
    rope = read_rope(below, full.head_dim, max_positions=positions, partial=0.5)
    return ModelConfig(
        architecture="bamba",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=tuple(LayerConfig((Block((mixer,)), Block((ffn,)))) for mixer in mixers),
        ropes=(rope,),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _attention(hf: HFConfig, hidden: int) -> AttentionConfig:
    heads = hf.integer("num_attention_heads", 32)
    kv_heads = heads if hf.values.get("num_key_value_heads", 8) is None else hf.integer("num_key_value_heads", 8)
    head_dim = hf.head_dim(hidden, heads)
    bias = hf.flag("attention_bias", False)
    return AttentionConfig(heads, kv_heads, head_dim, scale=head_dim**-0.5, bias=bias, dense_bias=bias, rope=0)


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case Mamba2Config():
            return mamba2(f"{prefix}.mamba", branch)
        case _:
            return gated_mlp(f"{prefix}.feed_forward")


FAMILY = Family(
    model_types=("bamba",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
