"""OLMo Hybrid: gated delta rule and attention, dense.

Facts from transformers' `OlmoHybridConfig` and its modelling code: layers with attention norm what their blocks put
out, the others what goes in; q and k are normed over all heads together; there are positions only if a `rope_theta` is
given; beta goes up to 2; the norm after the gated delta rule has an epsilon of its own. On the hub the norms of
layers with linear attention have other names and its three convolutions lie one by one (transformers saves them cut
into equal parts).
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig, RopeConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, attention, gated_delta, gated_mlp
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Concat, DropAxis, FirstOf, Sources, either

POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
DECODER = Decoder(post_norms=POST_NORMS)
# As transformers saves it: it renames the norms after attention together with those of the other layers.
SAVED = Decoder(
    pre_norms=("attention_layer_norm.weight", "feedforward_layer_norm.weight"),
    post_norms=("feedforward_layer_norm.weight", POST_NORMS[1]),
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


def _config(hf: HFConfig) -> ModelConfig:
    hidden, heads = hf.integer("hidden_size", 3840), hf.integer("num_attention_heads", 30)
    head_dim = hf.head_dim(hidden, heads)
    positions = hf.integer("max_position_embeddings", 65536)
    bias = hf.flag("attention_bias", False)
    rope = _rope(hf, head_dim, positions)
    full = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", heads, nullable=True),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        dense_bias=bias,
        qk_norm="full",
        rope=0 if rope else None,
    )
    mlp = MlpConfig(hf.integer("intermediate_size", 11008), hf.choice("hidden_act", "silu", ("silu",)))
    layers = {
        "full_attention": LayerConfig(tuple(Block((b,), pre_norm=False, post_norm=True) for b in (full, mlp))),
        "linear_attention": LayerConfig((Block((_linear(hf, hidden, heads),)), Block((mlp,)))),
    }
    vocab_size = hf.integer("vocab_size", 100352)
    return ModelConfig(
        architecture="olmo_hybrid",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(layers[kind] for kind in _pattern(hf)),
        ropes=rope,
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 100257, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 100277, vocab_size=vocab_size),
    )


def _pattern(hf: HFConfig) -> tuple[str, ...]:
    """Attention in every fourth layer, or at least in the last; layers of either kind must be there."""
    kinds = ("linear_attention", "full_attention")
    pattern = hf.layer_pattern("layer_types", allowed=kinds)
    count = hf.layer_count(32, pattern)
    if pattern is None:
        pattern = tuple(kinds[i % 4 == 3 or i == count - 1 < 3] for i in range(count))
    if set(pattern) != set(kinds):
        name = "num_hidden_layers" if hf.values.get("layer_types") is None else "layer_types"
        raise hf.error(name, "layers of linear and of full attention, at least one each")
    return pattern


def _linear(hf: HFConfig, hidden: int, heads: int) -> GatedDeltaConfig:
    k_heads = hf.integer("linear_num_key_heads", heads, nullable=True)
    head_k_dim = hf.integer("linear_key_head_dim", max(int(0.75 * hidden / k_heads), 1), nullable=True)
    return GatedDeltaConfig(
        num_k_heads=k_heads,
        num_v_heads=hf.integer("linear_num_value_heads", heads, nullable=True),
        head_k_dim=head_k_dim,
        head_v_dim=hf.integer("linear_value_head_dim", 2 * head_k_dim, nullable=True),
        conv_width=hf.integer("linear_conv_kernel_dim", 4, minimum=2),
        beta_scale=2.0 if hf.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )


def _rope(hf: HFConfig, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
    """None if `rope_theta` is null; where it is absent it takes the library's default."""
    section = hf.section("rope_scaling", "rope_parameters")
    values = section.values if "rope_theta" in section.values else hf.values
    if "rope_theta" in values and values["rope_theta"] is None:
        return ()
    return (read_rope(hf, head_dim, max_positions=positions),)


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case GatedDeltaConfig():
            return _gated_delta(f"{prefix}.linear_attn", branch)
        case _:
            return gated_mlp(f"{prefix}.mlp")


def _gated_delta(prefix: str, config: GatedDeltaConfig) -> Sources:
    sources = gated_delta(prefix, config, PROJECTIONS, norm="o_norm", out="o_proj")
    parts = tuple(DropAxis(f"{prefix}.{name}.weight") for name in CONVOLUTIONS)
    third = -(-config.conv_dim // 3)
    apart = (
        Concat(parts, rows=(config.k_dim, config.k_dim, config.v_dim)),
        Concat(parts, rows=(third, third, config.conv_dim - 2 * third)),
    )
    return sources | {"conv.weight": FirstOf((*apart, DropAxis(f"{prefix}.conv1d.weight")))}


FAMILY = Family(
    model_types=("olmo_hybrid",),
    config=_config,
    sources=lambda config: either(*(decoder.sources(config, _branch) for decoder in (DECODER, SAVED))),
    ignored=("*.rotary_emb.inv_freq",),
)
