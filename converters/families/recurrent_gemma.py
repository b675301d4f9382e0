"""RecurrentGemma: RG-LRU blocks and attention in a window, gated MLPs with biases.

Facts from transformers' `RecurrentGemmaConfig` and its modelling code: all norms are zero-centred; `block_types`
repeats over the layers; `intermediate_size` counts gate and up together; the embedding's multiplier is a bfloat16
number whatever the dtype of the weights.
"""

from __future__ import annotations

import numpy as np

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_mlp
from hybridtrt.converters.mixers import AttentionConfig, Mixer, RgLruConfig
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import AddOne, Concat, DropAxis, Named, Reshaped, Sources

DECODER = Decoder(
    pre_norms=("temporal_pre_norm.weight", "channel_pre_norm.weight"),
    final_norm="model.final_norm.weight",
    norm=AddOne,
)
BLOCK_TYPES = ("recurrent", "recurrent", "attention")


def _config(hf: HFConfig) -> ModelConfig:
    count = hf.layer_count(26, None)
    types = hf.values.get("block_types", list(BLOCK_TYPES))
    if not isinstance(types, list) or not types or not all(kind in BLOCK_TYPES for kind in types):
        raise hf.error("block_types", "a list of recurrent and attention")
    hidden = hf.integer("hidden_size", 2560)
    vocab_size = hf.integer("vocab_size", 256000)
    positions = hf.integer("max_position_embeddings", 2**31 - 1)  # not a key of the class: nothing bounds the length
    heads = hf.integer("num_attention_heads", 10)
    head_dim = hf.head_dim(hidden, heads)
    rope = hf.section("rope_scaling", "rope_parameters")
    rope.choice("rope_type" if "rope_type" in rope.values else "type", "default", ("default",))
    hf.choice("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    mixers: dict[str, Mixer] = {
        "recurrent": RgLruConfig(
            channels=hf.integer("lru_width", hidden, nullable=True),
            num_heads=heads,
            conv_width=hf.integer("conv1d_width", 4, minimum=2),
        ),
        "attention": AttentionConfig(
            num_heads=heads,
            num_kv_heads=hf.integer("num_key_value_heads", heads, nullable=True),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            bias=hf.flag("attention_bias", False),
            dense_bias=True,
            rope=0,
            window=hf.integer(
                "attention_window_size" if "attention_window_size" in hf.values else "sliding_window", 2048
            ),
        ),
    }
    mlp = MlpConfig(hf.integer("intermediate_size", 7680, minimum=2) // 2, "gelu_tanh", bias=True)
    return ModelConfig(
        architecture="recurrent_gemma",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(LayerConfig((Block((mixers[types[i % len(types)]],)), Block((mlp,)))) for i in range(count)),
        ropes=(read_rope(hf, head_dim, max_positions=positions, partial=0.5),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        embedding_multiplier=_bfloat16(hidden**0.5),
        logits_softcap=hf.number("logits_soft_cap", 30.0, positive=True),
        bos_token_id=hf.token_id("bos_token_id", 2, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 1, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _bfloat16(number: float) -> float:
    """The nearest number of bfloat16, of two the even one."""
    bits = int(np.float32(number).view(np.uint32))
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(rounded & 0xFFFF0000).view(np.float32))


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.temporal_block", branch)
        case RgLruConfig():
            return _rg_lru(f"{prefix}.temporal_block", branch)
        case _:
            return gated_mlp(f"{prefix}.mlp_block")


def _rg_lru(prefix: str, config: RgLruConfig) -> Sources:
    blocks = (config.num_heads, config.channels // config.num_heads)
    sources: Sources = {
        "conv.weight": DropAxis(f"{prefix}.conv_1d.weight"),
        "conv.bias": Named(f"{prefix}.conv_1d.bias"),
        "input_gate": Named(f"{prefix}.rg_lru.input_gate_weight"),
        "input_bias": Reshaped(f"{prefix}.rg_lru.input_gate_bias", blocks),
        "recurrence_gate": Named(f"{prefix}.rg_lru.recurrent_gate_weight"),
        "recurrence_bias": Reshaped(f"{prefix}.rg_lru.recurrent_gate_bias", blocks),
        "decay": Named(f"{prefix}.rg_lru.recurrent_param"),
    }
    for part in ("weight", "bias"):
        sources[f"in_proj.{part}"] = Concat((Named(f"{prefix}.linear_y.{part}"), Named(f"{prefix}.linear_x.{part}")))
        sources[f"out_proj.{part}"] = Named(f"{prefix}.linear_out.{part}")
    return sources


FAMILY = Family(
    model_types=("recurrent_gemma",), config=_config, sources=lambda config: DECODER.sources(config, _branch)
)
