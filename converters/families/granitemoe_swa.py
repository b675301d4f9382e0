"""Granite with windows: attention with sinks, a rotary base a layer, and experts beside a shared MLP.

Facts from transformers' `GraniteMoeSWAConfig` and its modelling code: a base of 0 in `layer_rope_theta` is a layer
without positions; without `layer_types` every fourth layer sees everything.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, granite_moe
from hybridtrt.converters.mixers import AttentionConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Sources

DECODER = Decoder()


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=("sliding_attention", "full_attention"))
    count = hf.layer_count(32, pattern)
    if pattern is None:
        pattern = tuple("sliding_attention" if i % 4 else "full_attention" for i in range(count))
    hidden = hf.integer("hidden_size", 4096)
    vocab_size = hf.integer("vocab_size", 32000)
    positions = hf.integer("max_position_embeddings", 2048)
    heads = hf.integer("num_attention_heads", 32)
    head_dim = hf.head_dim(hidden, heads)
    bases = _bases(hf, count)
    tables = sorted({base for base in bases if base})
    window = hf.integer("sliding_window", 128) if "sliding_attention" in pattern else None
    bias = hf.flag("attention_bias", False)
    residual = hf.number("residual_multiplier", 1.0)
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 2),
        intermediate=hf.integer("intermediate_size", 11008),
        router=RouterConfig("softmax_topk"),
        activation=hf.choice("hidden_act", "silu", ("silu",)),
        shared_intermediate=hf.integer("shared_intermediate_size", 0, minimum=0),
    )

    def layer(kind: str, base: float) -> LayerConfig:
        mixer = AttentionConfig(
            num_heads=heads,
            num_kv_heads=hf.integer("num_key_value_heads", heads, nullable=True),
            head_dim=head_dim,
            scale=hf.number("attention_multiplier", 1.0),
            bias=bias,
            dense_bias=bias,
            rope=tables.index(base) if base else None,
            window=window if kind == "sliding_attention" else None,
            sinks=True,
        )
        return LayerConfig((Block((mixer,), residual), Block((moe,), residual)))

    return ModelConfig(
        architecture="granitemoe_swa",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(layer(kind, base) for kind, base in zip(pattern, bases, strict=True)),
        ropes=tuple(read_rope(_with_base(hf, base), head_dim, max_positions=positions) for base in tables),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / hf.number("logits_scaling", 1.0, positive=True),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _bases(hf: HFConfig, count: int) -> tuple[float, ...]:
    """The rotary base of each layer."""
    if hf.values.get("layer_rope_theta") is not None:
        return hf.numbers("layer_rope_theta", count, zeros=True)
    section = hf.section("rope_scaling", "rope_parameters")
    base = (section if "rope_theta" in section.values else hf).number("rope_theta", 10000.0, positive=True)
    return (base,) * count


def _with_base(hf: HFConfig, base: float) -> HFConfig:
    section = hf.section("rope_scaling", "rope_parameters")
    return HFConfig({**hf.values, "rope_scaling": {**section.values, "rope_theta": base}}, hf.source)


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    if isinstance(branch, AttentionConfig):
        return attention(f"{prefix}.self_attn", branch)
    return granite_moe(prefix)


FAMILY = Family(
    model_types=("granitemoe_swa",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
