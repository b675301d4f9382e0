"""Kimi Linear: Kimi Delta Attention and latent attention without positions, experts chosen by sigmoid scores.

Facts from transformers' `KimiLinearConfig` and its modelling code. On the hub `linear_attn_config` holds the shapes and
the layers of the linear attention, numbered from 1; many keys have two spellings; experts lie under
`block_sparse_moe`, where transformers puts dense layers too when it saves.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, experts, gated_mlp, kda
from hybridtrt.converters.mixers import KdaConfig, Mixer, MlaConfig
from hybridtrt.converters.mla import mla_sources, read_mla
from hybridtrt.converters.sources import Named, Sources, either

DECODER = Decoder()
KINDS = ("linear_attention", "full_attention")


def _config(hf: HFConfig) -> ModelConfig:
    hf.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
    if not hf.flag("mla_use_nope", True):
        raise hf.error("mla_use_nope", "true, attention without positions")
    mixers: dict[str, Mixer] = {
        "linear_attention": _linear(hf),
        "full_attention": read_mla(hf, kv_heads=32, rope=None),
    }
    pattern = _pattern(hf)
    vocab_size = hf.integer("vocab_size", 163840)
    return ModelConfig(
        architecture="kimi_linear",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 2304),
        max_position_embeddings=hf.integer(hf.spelled("model_max_length", "max_position_embeddings"), 1048576),
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=read_layers(
            hf,
            [mixers[kind] for kind in pattern],
            dense=1,
            mlp=MlpConfig(hf.integer("intermediate_size", 9216), hf.choice("hidden_act", "silu", ("silu",))),
            moe=read_moe(hf, experts=256, intermediate=1024, scaling=2.446, groups=(1, 1)),
        ),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 163584, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 163586, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 163839, vocab_size=vocab_size),
    )


def _pattern(hf: HFConfig) -> tuple[str, ...]:
    """`layer_types`, or the two lists of `linear_attn_config`, or attention after every fourth layer."""
    pattern = hf.layer_pattern("layer_types", allowed=KINDS)
    count = hf.layer_count(27, pattern)
    if pattern is not None:
        return pattern
    lists = hf.section("linear_attn_config")
    if not {"full_attn_layers", "kda_layers"} <= set(lists.values):
        return tuple(KINDS[i > 0 and i % 4 == 0] for i in range(count))
    full, linear = lists.integers("full_attn_layers"), lists.integers("kda_layers")
    if sorted((*full, *linear)) != list(range(1, count + 1)):
        raise lists.error("full_attn_layers", f"with kda_layers every layer from 1 to {count} once")
    return tuple(KINDS[i + 1 in full] for i in range(count))


def _linear(hf: HFConfig) -> KdaConfig:
    hub = hf.section("linear_attn_config")

    def read(name: str, key: str, default: int, minimum: int = 1) -> int:
        return hub.integer(name, minimum=minimum) if name in hub.values else hf.integer(key, default, minimum=minimum)

    head_dim = read("head_dim", "linear_head_dim", 128)
    return KdaConfig(
        num_heads=read("num_heads", "linear_num_heads", 32),
        head_dim=head_dim,
        conv_width=read("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2),
        decay_rank=head_dim,
        gate_rank=head_dim,
    )


def read_layers(
    hf: HFConfig, mixers: list[Mixer], dense: int, mlp: MlpConfig, moe: MoeConfig
) -> tuple[LayerConfig, ...]:
    """Layers whose first `first_k_dense_replace` (`dense` if absent) are dense, or by `mlp_layer_types`."""
    kinds = hf.layer_pattern("mlp_layer_types", allowed=("dense", "sparse"))
    if kinds is None:
        dense = hf.integer("first_k_dense_replace", dense, minimum=0)
        kinds = tuple("dense" if i < dense else "sparse" for i in range(len(mixers)))
    if len(kinds) != len(mixers):
        raise hf.error("mlp_layer_types", f"{len(mixers)} entries, the number of layers")
    ffns: dict[str, Ffn] = {"dense": mlp, "sparse": moe}
    return tuple(
        LayerConfig((Block((mixer,)), Block((ffns[kind],)))) for mixer, kind in zip(mixers, kinds, strict=True)
    )


def read_moe(hf: HFConfig, experts: int, intermediate: int, scaling: float, groups: tuple[int, int]) -> MoeConfig:
    """Experts in either spelling of the keys; the class's defaults are given."""
    intermediate = hf.integer("moe_intermediate_size", intermediate)
    return MoeConfig(
        num_experts=hf.integer(hf.spelled("num_experts", "num_local_experts"), experts, maximum=MAX_EXPERTS),
        top_k=hf.integer(hf.spelled("num_experts_per_token", "num_experts_per_tok"), 8),
        intermediate=intermediate,
        router=RouterConfig(
            "sigmoid",
            renormalize=hf.flag(hf.spelled("moe_renormalize", "norm_topk_prob"), True),
            renormalize_eps=1e-20,
            scaling=hf.number("routed_scaling_factor", scaling),
            selection_bias=True,
            num_groups=hf.integer(hf.spelled("num_expert_group", "n_group"), groups[0]),
            top_groups=hf.integer("topk_group", groups[1]),
        ),
        activation=hf.choice("hidden_act", "silu", ("silu",)),
        shared_intermediate=hf.integer(hf.spelled("num_shared_experts", "n_shared_experts"), 1) * intermediate,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    attention = f"{prefix}.self_attn"
    match branch:
        case MlaConfig():
            return mla_sources(attention, branch)
        case KdaConfig():
            rates = (1, 1, branch.num_heads, 1)
            return either(*(kda(attention, branch, forget, rates=rates) for forget in ("", "forget_gate.")))
        case _:
            return either(*(_ffn(f"{prefix}.{name}", branch) for name in ("block_sparse_moe", "mlp")))


def _ffn(prefix: str, branch: Mixer | Ffn) -> Sources:
    if not isinstance(branch, MoeConfig):
        return gated_mlp(prefix)
    return {
        "router.weight": Named(f"{prefix}.gate.weight"),
        "router.selection_bias": Named(f"{prefix}.gate.e_score_correction_bias"),
        **experts(f"{prefix}.experts", branch, ("w1", "w3", "w2")),
        **gated_mlp(f"{prefix}.shared_experts", "shared."),
    }


FAMILY = Family(
    model_types=("kimi_linear",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
