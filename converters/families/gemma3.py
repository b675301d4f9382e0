"""Gemma 3, its text model: attention in windows between layers of full attention, norms before and after each block.

Facts from transformers' `Gemma3TextConfig` and its modelling code: all norms are zero-centred; layers in a window and
those of full attention have rotary tables of their own, and version 4 names their bases `rope_local_base_freq` and
`rope_theta`; `attn_logit_softcapping` is read by no code.
"""

from __future__ import annotations

import math

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig, RopeConfig
from hybridtrt.converters.family import TEXT_NESTINGS, Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_mlp
from hybridtrt.converters.mixers import AttentionConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import AddOne, Sources

DECODER = Decoder(
    pre_norms=("input_layernorm.weight", "pre_feedforward_layernorm.weight"),
    post_norms=("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
    norm=AddOne,
)
ROPES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


def _config(wrapper: HFConfig) -> ModelConfig:
    hf = wrapper.text()
    if hf is wrapper and wrapper.values.get("model_type") == "gemma3":  # a text part that is all defaults
        hf = HFConfig({"tie_word_embeddings": wrapper.flag("tie_word_embeddings", True)}, wrapper.source)
    pattern = hf.layer_pattern("layer_types", allowed=tuple(ROPES))
    count = hf.layer_count(26, pattern)
    if pattern is None:
        every = hf.integer("sliding_window_pattern", 6)
        pattern = tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(count))
    for key in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if hf.values.get(key):
            raise hf.error(key, "false or null")
    hidden = hf.integer("hidden_size", 2304)
    vocab_size = hf.integer("vocab_size", 262208)
    positions = hf.integer("max_position_embeddings", 131072)
    mixers = _mixers(hf, pattern)
    mlp = MlpConfig(
        hf.integer("intermediate_size", 9216),
        ACTIVATIONS[hf.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)],
    )
    softcap = hf.values.get("final_logit_softcapping")
    head_dim = mixers["full_attention"].head_dim
    return ModelConfig(
        architecture="gemma3_text",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(
            LayerConfig((Block((mixers[kind],), post_norm=True), Block((mlp,), post_norm=True))) for kind in pattern
        ),
        ropes=tuple(_rope(hf, kind, head_dim, positions) for kind in ROPES),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        embedding_multiplier=math.sqrt(hidden),
        logits_softcap=None if softcap is None else hf.number("final_logit_softcapping", positive=True),
        bos_token_id=hf.token_id("bos_token_id", 2, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 1, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _mixers(hf: HFConfig, pattern: tuple[str, ...]) -> dict[str, AttentionConfig]:
    bias = hf.flag("attention_bias", False)
    windows: dict[str, int | None] = {"full_attention": None}
    if "sliding_attention" in pattern:
        windows["sliding_attention"] = hf.integer("sliding_window", 4096)
    return {
        kind: AttentionConfig(
            num_heads=hf.integer("num_attention_heads", 8),
            num_kv_heads=hf.integer("num_key_value_heads", 4),
            head_dim=hf.integer("head_dim", 256),
            scale=hf.number("query_pre_attn_scalar", 256, positive=True) ** -0.5,
            bias=bias,
            dense_bias=bias,
            qk_norm="head",
            rope=list(ROPES).index(kind),
            window=window,
        )
        for kind, window in windows.items()
    }


def _rope(hf: HFConfig, kind: str, head_dim: int, positions: int) -> RopeConfig:
    """A version 4 `rope_scaling` is that of full attention."""
    given = hf.section("rope_parameters")
    if not set(given.values) <= set(ROPES):
        raise hf.error("rope_parameters", f"those of {' and '.join(ROPES)}")
    own = dict(given.section(kind).values)
    if kind == "full_attention":
        own |= hf.section("rope_scaling").values
    key, theta = ROPES[kind]
    return read_rope(
        HFConfig({"rope_parameters": own}, hf.source), head_dim, max_positions=positions, theta=hf.number(key, theta)
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    if isinstance(branch, AttentionConfig):
        return attention(f"{prefix}.self_attn", branch, norm=AddOne)
    return gated_mlp(f"{prefix}.mlp")


FAMILY = Family(
    model_types=("gemma3", "gemma3_text"),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*vision_tower.*", "*multi_modal_projector.*", "*.rotary_emb.inv_freq"),
    nestings=TEXT_NESTINGS,
)
