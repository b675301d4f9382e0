"""The selective state space layer (Mamba)."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import Mamba1Config


def mamba1(scope: Scope, x: str, config: Mamba1Config, shared: Shared) -> str:
    """Mamba: convolution, input-dependent dt, B and C (each head its own), selective scan, SiLU gate."""
    u, z = scope.split(scope.linear(x, "in_proj"), "split", (config.inner,), (config.inner,))
    u = scope.conv(u)
    bc = (config.num_heads, config.d_state)
    dt, B, C = scope.split(scope.linear(u, "x_proj"), "split_dt_bc", (config.dt_width,), bc, bc)
    if config.dt_bc_norm == "weighted":
        dt, B, C = scope.norm(dt, "dt_norm"), scope.norm(B, "B_norm"), scope.norm(C, "C_norm")
    elif config.dt_bc_norm == "plain":
        eps = config.dt_bc_norm_eps
        (dt,), (B,), (C,) = (
            scope.call("rms_norm", f"{name}_norm", part, eps=eps) for name, part in (("dt", dt), ("B", B), ("C", C))
        )
    (y,) = scope.program.call(
        "selective_scan",
        scope.path("core"),
        u,
        scope.linear(dt, "dt_proj"),
        B,
        C,
        weights={name: scope.weight(name) for name in ("A_log", "D", "dt_bias")},
        caches={"state": scope.path("state")},
    )
    (opened,) = scope.call("activation", "gate", z, kind="silu")
    (y,) = scope.call("multiply", "gated", y, opened)
    return scope.linear(y, "out_proj")
