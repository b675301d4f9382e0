"""Kimi Delta Attention."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import KdaConfig


def kda(scope: Scope, x: str, config: KdaConfig, shared: Shared) -> str:
    """q, k, v through a convolution, the delta rule with a decay a channel, a sigmoid-gated norm for each head."""
    heads = (config.num_heads, config.head_dim)
    qkv, b, a, z = scope.split(scope.linear(x, "in_proj"), "split", *((rows,) for rows in config.projections))
    if config.decay_rank is not None:
        a = scope.linear(a, "decay_up")
    if config.gate_rank is not None:
        z = scope.linear(z, "gate_up")
    (a,), (z,) = scope.split(a, "decay", heads), scope.split(z, "gate", heads)
    q, k, v = scope.split(scope.conv(qkv), "split_qkv", heads, heads, heads)
    (y,) = scope.program.call(
        "linear_attention",
        scope.path("core"),
        q,
        k,
        v,
        a,
        b,
        weights={name: scope.weight(name) for name in ("A_log", "dt_bias")},
        caches={"state": scope.path("state")},
        rule="gated_delta",
        scale=config.head_dim**-0.5,
        l2_norm=True,
        decay_bound=config.decay_bound,
    )
    y = scope.norm(y, "norm", gate=z, gate_kind="sigmoid")
    return scope.linear(scope.call("flatten", "heads", y)[0], "out_proj")
