"""The state space duality layer (Mamba-2)."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import Mamba2Config


def mamba2(scope: Scope, x: str, config: Mamba2Config, shared: Shared) -> str:
    """Mamba-2: x, B, C through a convolution, state space duality, a norm of the gated output."""
    bc = (config.n_groups, config.d_state)
    z, xbc, dt = scope.split(
        scope.linear(x, "in_proj"), "split", (config.inner,), (config.conv_dim,), (config.num_heads,)
    )
    u, B, C = scope.split(scope.conv(xbc), "split_xbc", (config.num_heads, config.head_dim), bc, bc)
    (y,) = scope.program.call(
        "ssd",
        scope.path("core"),
        u,
        dt,
        B,
        C,
        weights={name: scope.path(name) for name in ("A_log", "D", "dt_bias")},
        caches={"state": scope.path("state")},
        dt_min=config.dt_min,
        dt_max=config.dt_max,
    )
    y = scope.norm(scope.call("flatten", "heads", y)[0], "norm", gate=z, gate_first=True)
    return scope.linear(y, "out_proj")
