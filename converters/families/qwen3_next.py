"""Qwen3-Next: gated delta rule and gated attention, mixture of experts with a gated shared expert.

Facts from transformers' `Qwen3NextConfig` and its modelling code: every norm is zero-centred except the one after the
gated delta rule; `q_proj` holds q and output gate head by head; `in_proj_qkvz` and `in_proj_ba` lie key head by key
head.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, experts, gated_mlp
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import AddOne, Concat, Deinterleave, DropAxis, Named, Sources

DECODER = Decoder(norm=AddOne)


def _config(hf: HFConfig) -> ModelConfig:
    activation = hf.choice("hidden_act", "silu", ("silu",))
    mixers = read_mixers(hf, 48, kv_heads=2)
    ffns = _ffns(hf, len(mixers), activation)
    return read_model("qwen3_next", hf, mixers, ffns, vocab_size=151936, hidden=2048)


def read_mixers(hf: HFConfig, layers: int, kv_heads: int) -> list[Mixer]:
    """The mixer of each layer; the class's defaults are given."""
    pattern = hf.layer_pattern("layer_types", allowed=("linear_attention", "full_attention"))
    count = hf.layer_count(layers, pattern)
    if pattern is None:
        interval = hf.integer("full_attention_interval", 4)
        pattern = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    head_dim = hf.integer("head_dim", 256)
    bias = hf.flag("attention_bias", False)
    full = AttentionConfig(
        num_heads=hf.integer("num_attention_heads", 16),
        num_kv_heads=hf.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        dense_bias=bias,
        qk_norm="head",
        output_gate=True,
        rope=0,
    )
    linear = GatedDeltaConfig(
        num_k_heads=hf.integer("linear_num_key_heads", 16),
        num_v_heads=hf.integer("linear_num_value_heads", 32),
        head_k_dim=hf.integer("linear_key_head_dim", 128),
        head_v_dim=hf.integer("linear_value_head_dim", 128),
        conv_width=hf.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
    return [full if kind == "full_attention" else linear for kind in pattern]


def read_model(
    name: str, hf: HFConfig, mixers: list[Mixer], ffns: list[Ffn], vocab_size: int, hidden: int
) -> ModelConfig:
    """The model of these layers; the class's defaults are given."""
    vocab_size = hf.integer("vocab_size", vocab_size)
    positions = hf.integer("max_position_embeddings", 32768)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", hidden),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(LayerConfig((Block((mixer,)), Block((ffn,)))) for mixer, ffn in zip(mixers, ffns, strict=True)),
        ropes=(read_rope(hf, hf.integer("head_dim", 256), max_positions=positions, partial=0.25),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _ffns(hf: HFConfig, count: int, activation: str) -> list[Ffn]:
    """Experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    mlp = MlpConfig(hf.integer("intermediate_size", 5632), activation)
    num_experts = hf.integer("num_experts", 512, minimum=0, maximum=MAX_EXPERTS)
    mlp_only = hf.integers("mlp_only_layers")
    step = hf.integer("decoder_sparse_step", 1)
    if num_experts == 0:
        return [mlp] * count
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=hf.integer("num_experts_per_tok", 10),
        intermediate=hf.integer("moe_intermediate_size", 512),
        router=RouterConfig("softmax", renormalize=hf.flag("norm_topk_prob", True)),
        activation=activation,
        shared_intermediate=hf.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return [mlp if i in mlp_only or (i + 1) % step else moe for i in range(count)]


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    if isinstance(branch, GatedDeltaConfig):
        return _gated_delta(f"{prefix}.linear_attn", branch)
    return other_branch(prefix, branch)


def other_branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    """Weights of every branch but the linear attention."""
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch, norm=AddOne)
        case MoeConfig():
            return {
                "router.weight": Named(f"{prefix}.mlp.gate.weight"),
                "shared_gate.weight": Named(f"{prefix}.mlp.shared_expert_gate.weight"),
                **experts(f"{prefix}.mlp.experts", branch),
                **gated_mlp(f"{prefix}.mlp.shared_expert", "shared."),
            }
        case _:
            return gated_mlp(f"{prefix}.mlp")


def _gated_delta(prefix: str, config: GatedDeltaConfig) -> Sources:
    values_per_key = config.num_v_heads // config.num_k_heads
    value_dim = values_per_key * config.head_v_dim
    qkvz = (config.head_k_dim, config.head_k_dim, value_dim, value_dim)
    parts = (
        Deinterleave(f"{prefix}.in_proj_qkvz.weight", config.num_k_heads, qkvz),
        Deinterleave(f"{prefix}.in_proj_ba.weight", config.num_k_heads, (values_per_key, values_per_key)),
    )
    return {
        "in_proj.weight": Concat(parts, rows=(config.conv_dim + config.v_dim, 2 * config.num_v_heads)),
        "conv.weight": DropAxis(f"{prefix}.conv1d.weight"),
        "A_log": Named(f"{prefix}.A_log"),
        "dt_bias": Named(f"{prefix}.dt_bias"),
        "norm.weight": Named(f"{prefix}.norm.weight"),
        "out_proj.weight": Named(f"{prefix}.out_proj.weight"),
    }


FAMILY = Family(
    model_types=("qwen3_next",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("mtp.*", "*.rotary_emb.inv_freq"),  # mtp: layers for multi-token prediction
)
