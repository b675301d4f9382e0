"""Lightning attention."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import LightningConfig


def lightning(scope: Scope, x: str, config: LightningConfig, shared: Shared) -> str:
    """Activated q, k, v, linear attention with constant decays, a norm of all heads together and a sigmoid gate."""
    heads = (config.num_heads, config.head_dim)
    qkv, z = scope.split(scope.linear(x, "in_proj"), "split", (3 * config.inner,), (config.inner,))
    (qkv,) = scope.call("activation", "act", qkv, kind=config.activation)
    (y,) = scope.program.call(
        "linear_attention",
        scope.path("core"),
        *scope.split(qkv, "split_qkv", heads, heads, heads),
        weights={"A_log": scope.weight("A_log")},
        caches={"state": scope.path("state")},
        rule="gated",
        scale=1.0,
    )
    (y,) = scope.call("flatten", "heads", y)
    return scope.linear(scope.norm(y, "norm", gate=z, eps=config.norm_eps, gate_kind="sigmoid"), "out_proj")
