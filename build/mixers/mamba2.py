"""The state space duality layer (Mamba-2)."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import Mamba2Config


def mamba2(scope: Scope, x: str, config: Mamba2Config, shared: Shared) -> str:
    """Mamba-2: x, B, C through a convolution, state space duality, gate and norm of the output."""
    bc = (config.n_groups, config.d_state)
    z, xbc, dt = _project(scope, x, config)
    u, B, C = scope.split(scope.conv(xbc), "split_xbc", (config.num_heads, config.head_dim), bc, bc)
    (y,) = scope.program.call(
        "ssd",
        scope.path("core"),
        u,
        dt,
        B,
        C,
        weights={name: scope.weight(name) for name in ("A_log", "D", "dt_bias")},
        caches={"state": scope.path("state")},
        dt_min=config.dt_min,
        dt_max=config.dt_max,
    )
    (y,) = scope.call("flatten", "heads", y)
    if config.norm_groups > 1:
        (y,) = scope.split(y, "norm_groups", config.norm_shape)
    if config.norm == "none":
        (opened,) = scope.call("activation", "gate", z, kind="silu")
        (y,) = scope.call("multiply", "gated", y, opened)
    else:
        y = scope.norm(y, "norm", gate=z, gate_first=config.norm == "gated", eps=config.norm_eps)
    if config.norm_groups > 1:
        (y,) = scope.call("flatten", "channels", y)
    return scope.linear(y, "out_proj")


def _project(scope: Scope, x: str, config: Mamba2Config) -> tuple[str, ...]:
    """z, [x, B, C] and dt of a token, with their multipliers."""
    projected = scope.linear(x, "in_proj")
    if not config.multipliers:
        return scope.split(projected, "split", config.norm_shape, (config.conv_dim,), (config.num_heads,))
    bc = (config.n_groups * config.d_state,)
    parts = scope.split(projected, "split", config.norm_shape, (config.inner,), bc, bc, (config.num_heads,))
    z, u, B, C, dt = (
        scope.call("scale", f"{name}_scaled", part, by=by)[0]
        for name, part, by in zip(("z", "x", "B", "C", "dt"), parts, config.multipliers, strict=True)
    )
    (both,) = scope.call("concat", "BC", B, C)
    return z, scope.call("concat", "xBC", u, both)[0], dt
