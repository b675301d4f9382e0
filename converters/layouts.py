"""Checkpoint layouts that many families share, as rules from canonical weight names to sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.ffns import Ffn, MoeConfig
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig, KdaConfig, Mamba2Config, Mixer
from hybridtrt.converters.sources import (
    AddOne,
    Concat,
    Deinterleave,
    DropAxis,
    FirstOf,
    Named,
    Reshaped,
    Shape,
    Source,
    Sources,
    Stack,
    either,
)

Norm = type[Named] | type[AddOne]
BranchSources = Callable[[str, Mixer | Ffn], Sources]  # (prefix of the layer, branch) -> names relative to the branch


@dataclass(frozen=True)
class Decoder:
    """Names of what lies outside the branches. `pre_norms` and `post_norms` have one name for each block of a layer."""

    pre_norms: tuple[str, ...] = ("input_layernorm.weight", "post_attention_layernorm.weight")
    post_norms: tuple[str, ...] = ("", "")
    final_norm: str = "model.norm.weight"
    embedding: str = "model.embed_tokens.weight"
    lm_head: str = "lm_head.weight"
    layers: str = "model.layers"
    norm: Norm = Named

    def sources(self, config: ModelConfig, branch_sources: BranchSources) -> Sources:
        """The source of every weight of `config.weight_table()`, and of `lm_head.weight` also if it is tied."""
        sources: Sources = {"embedding.weight": Named(self.embedding), "lm_head.weight": Named(self.lm_head)}
        if config.head_bias:
            sources["lm_head.bias"] = Named(_bias(self.lm_head))
        norms = {"final_norm": self.final_norm}
        for i, layer in enumerate(config.layers):
            prefix = f"{self.layers}.{i}"
            for block, pre_norm, post_norm in zip(layer.blocks, self.pre_norms, self.post_norms, strict=True):
                first = f"layers.{i}.{block.branches[0].kind}"
                if block.pre_norm:
                    norms[f"{first}.pre_norm"] = f"{prefix}.{pre_norm}"
                if block.post_norm:
                    norms[f"{first}.post_norm"] = f"{prefix}.{post_norm}"
                for branch in block.branches:
                    found = branch_sources(prefix, branch)
                    for name in branch.weights(config.hidden_size):
                        sources[f"layers.{i}.{branch.kind}.{name}"] = found[name]
        for name, tensor in norms.items():
            sources[f"{name}.weight"] = self.norm(tensor)
            if config.norm == "layer":
                sources[f"{name}.bias"] = Named(_bias(tensor))
        return sources


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def attention(
    prefix: str,
    config: AttentionConfig,
    norm: Norm = Named,
    out: str = "o_proj",
    qk_norms: tuple[str, str] = ("q_norm", "k_norm"),
) -> Sources:
    """`q_proj`, `k_proj`, `v_proj`, `o_proj`; with an output gate `q_proj` holds q and gate head by head."""
    kv = config.num_kv_heads * config.head_dim
    q = config.num_heads * config.head_dim * (2 if config.output_gate else 1)
    sources: Sources = {
        "q_norm.weight": norm(f"{prefix}.{qk_norms[0]}.weight"),
        "k_norm.weight": norm(f"{prefix}.{qk_norms[1]}.weight"),
        "head_gate.weight": Named(f"{prefix}.g_proj.weight"),
        "sinks": Named(f"{prefix}.sinks"),
    }
    for part in ("weight", "bias"):
        query: Source = Named(f"{prefix}.q_proj.{part}")
        if config.output_gate:
            query = Deinterleave(f"{prefix}.q_proj.{part}", config.num_heads, (config.head_dim, config.head_dim))
        parts = (query, Named(f"{prefix}.k_proj.{part}"), Named(f"{prefix}.v_proj.{part}"))
        sources[f"qkv.{part}"] = Concat(parts, rows=(q, kv, kv))
        sources[f"dense.{part}"] = Named(f"{prefix}.{out}.{part}")
    return sources


def gated_delta(
    prefix: str, config: GatedDeltaConfig, projections: tuple[str, ...], norm: str = "norm", out: str = "out_proj"
) -> Sources:
    """A gated delta rule whose `projections` give, in this order, parts of q, k, v, z, b, a; convolution `conv1d`."""
    rows: tuple[int, ...] = (
        config.k_dim,
        config.k_dim,
        config.v_dim,
        config.v_dim,
        config.num_v_heads,
        config.num_v_heads,
    )
    joined = len(rows) - len(projections)  # of the first projections in one
    rows = (sum(rows[: joined + 1]), *rows[joined + 1 :])
    return _named(prefix, "A_log", "dt_bias") | {
        "in_proj.weight": Concat(tuple(Named(f"{prefix}.{name}.weight") for name in projections), rows=rows),
        "conv.weight": DropAxis(f"{prefix}.conv1d.weight"),
        "norm.weight": Named(f"{prefix}.{norm}.weight"),
        "out_proj.weight": Named(f"{prefix}.{out}.weight"),
    }


def kda(prefix: str, config: KdaConfig, forget: str = "", out: str = "o_proj", rates: Shape | None = None) -> Sources:
    """The names of Kimi Linear, with one convolution or one each for q, k and v.

    `forget` is the prefix of the decay's weights, `rates` the stored shape of `A_log`.
    """
    decay = ("f_proj",) if config.decay_rank is None else ("f_a_proj", "f_b_proj")
    gate = ("g_proj",) if config.gate_rank is None else ("g_a_proj", "g_b_proj")
    projections = ("q_proj", "k_proj", "v_proj", "b_proj", f"{forget}{decay[0]}", gate[0])
    rows = (config.inner,) * 3 + config.projections[1:]
    convolutions = Concat(tuple(DropAxis(f"{prefix}.{name}_conv1d.weight") for name in "qkv"))
    return {
        "in_proj.weight": Concat(tuple(Named(f"{prefix}.{name}.weight") for name in projections), rows=rows),
        "conv.weight": FirstOf((DropAxis(f"{prefix}.conv1d.weight"), convolutions)),
        "decay_up.weight": Named(f"{prefix}.{forget}{decay[-1]}.weight"),
        "gate_up.weight": Named(f"{prefix}.{gate[-1]}.weight"),
        "A_log": Reshaped(f"{prefix}.{forget}A_log", rates or (config.num_heads,)),
        "dt_bias": Reshaped(f"{prefix}.{forget}dt_bias", (config.inner,)),
        "norm.weight": Named(f"{prefix}.o_norm.weight"),
        "out_proj.weight": Named(f"{prefix}.{out}.weight"),
    }


MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(prefix: str, name: str = "", names: tuple[str, str, str] = MLP_NAMES) -> Sources:
    """Gate, up and down projections by their names."""
    gate, up, down = (f"{prefix}.{projection}" for projection in names)
    sources: Sources = {}
    for part in ("weight", "bias"):
        sources[f"{name}gate_up.{part}"] = Concat((Named(f"{gate}.{part}"), Named(f"{up}.{part}")))
        sources[f"{name}down.{part}"] = Named(f"{down}.{part}")
    return sources


def plain_mlp(prefix: str, name: str = "") -> Sources:
    """`up_proj`, `down_proj`, without a gate."""
    return {
        f"{name}{weight}.{part}": Named(f"{prefix}.{weight}_proj.{part}")
        for weight in ("up", "down")
        for part in ("weight", "bias")
    }


def experts(prefix: str, config: MoeConfig, names: tuple[str, str, str] = MLP_NAMES) -> Sources:
    """Experts packed (`gate_up_proj` or, not gated, `up_proj`; `down_proj`) or one by one by `names` (`{e}.{name}`)."""
    gate, up, down = names
    one_by_one = [f"{prefix}.{e}" for e in range(config.num_experts)]
    ups: list[Source] = [Named(f"{expert}.{up}.weight") for expert in one_by_one]
    if config.gated:
        gates = (Named(f"{expert}.{gate}.weight") for expert in one_by_one)
        ups = [Concat(pair) for pair in zip(gates, ups, strict=True)]
    downs = tuple(Named(f"{expert}.{down}.weight") for expert in one_by_one)
    packed = "gate_up" if config.gated else "up"
    return {
        f"experts.{packed}": FirstOf((Named(f"{prefix}.{packed}_proj"), Stack(tuple(ups)))),
        "experts.down": FirstOf((Named(f"{prefix}.down_proj"), Stack(downs))),
    }


def granite_moe(prefix: str) -> Sources:
    """Granite's experts and shared MLP of a layer, as saved or under their names in the network."""
    moe = f"{prefix}.block_sparse_moe"
    return granite_mlp(prefix, "shared.") | {
        "router.weight": FirstOf((Named(f"{moe}.router.weight"), Named(f"{moe}.router.layer.weight"))),
        "experts.gate_up": FirstOf((Named(f"{moe}.experts.gate_up_proj"), Named(f"{moe}.input_linear.weight"))),
        "experts.down": FirstOf((Named(f"{moe}.experts.down_proj"), Named(f"{moe}.output_linear.weight"))),
    }


def granite_mlp(prefix: str, name: str = "") -> Sources:
    """Granite's shared MLP, gate and up in one."""
    return {
        f"{name}gate_up.weight": Named(f"{prefix}.shared_mlp.input_linear.weight"),
        f"{name}down.weight": Named(f"{prefix}.shared_mlp.output_linear.weight"),
    }


def short_conv(prefix: str) -> Sources:
    """The names of Liquid's models."""
    return _named(prefix, "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias") | {
        "conv.weight": DropAxis(f"{prefix}.conv.weight"),
        "conv.bias": Named(f"{prefix}.conv.bias"),
    }


def mixtral_moe(prefix: str, config: MoeConfig, router: str = "gate") -> Sources:
    """The names of Mixtral: `block_sparse_moe` and `w1`, `w3`, `w2`, or `mlp` with `router` and packed experts."""
    hub, new = f"{prefix}.block_sparse_moe", f"{prefix}.mlp"
    names = ("w1", "w3", "w2")
    return either(
        {"router.weight": Named(f"{hub}.gate.weight"), **experts(f"{hub}.experts", config, names)},
        {"router.weight": Named(f"{new}.{router}.weight"), **experts(f"{new}.experts", config, names)},
    )


def mamba1(prefix: str) -> Sources:
    """The names of the reference implementation of Mamba, with Jamba's norms."""
    return _named(prefix, "in_proj.weight", "in_proj.bias", "x_proj.weight", "dt_proj.weight", "A_log", "D") | {
        **_named(prefix, "out_proj.weight", "out_proj.bias"),
        "conv.weight": DropAxis(f"{prefix}.conv1d.weight"),
        "conv.bias": Named(f"{prefix}.conv1d.bias"),
        "dt_bias": Named(f"{prefix}.dt_proj.bias"),
        "dt_norm.weight": Named(f"{prefix}.dt_layernorm.weight"),
        "B_norm.weight": Named(f"{prefix}.b_layernorm.weight"),
        "C_norm.weight": Named(f"{prefix}.c_layernorm.weight"),
    }


def mamba2(prefix: str, config: Mamba2Config) -> Sources:
    """The names of the reference implementation of Mamba-2."""
    return _named(prefix, "in_proj.weight", "in_proj.bias", "A_log", "D", "dt_bias") | {
        "norm.weight": Reshaped(f"{prefix}.norm.weight", (config.inner,)),
        **_named(prefix, "out_proj.weight", "out_proj.bias"),
        "conv.weight": DropAxis(f"{prefix}.conv1d.weight"),
        "conv.bias": Named(f"{prefix}.conv1d.bias"),
    }


def _named(prefix: str, *names: str) -> dict[str, Source | FirstOf]:
    return {name: Named(f"{prefix}.{name}") for name in names}
