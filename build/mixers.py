"""Token mixers as operator calls: `[T, hidden]` to `[T, hidden]`, one function a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridtrt.build.scope import Scope
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig, Mamba1Config, Mamba2Config


@dataclass(frozen=True)
class Shared:
    """Values computed once a step that several layers read."""

    rope: tuple[str, str] | None  # cos and sin


def attention(scope: Scope, x: str, config: AttentionConfig, shared: Shared) -> str:
    """Grouped-query attention; QK norm, then rotary, then an optional sigmoid gate on the output."""
    q_shape, kv_shape = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    gates = [q_shape] if config.output_gate else []
    q, *gate, k, v = scope.split(scope.linear(x, "qkv"), "split", q_shape, *gates, kv_shape, kv_shape)
    if config.qk_norm:
        q, k = scope.norm(q, "q_norm"), scope.norm(k, "k_norm")
    if config.rope:
        if shared.rope is None:
            raise ValueError(f"{scope.prefix}: rope=True, but the model has no rotary table")
        (q,) = scope.call("rotary", "q_rotary", q, *shared.rope)
        (k,) = scope.call("rotary", "k_rotary", k, *shared.rope)
    (page_spec,) = config.caches(scope.prefix)
    (y,) = scope.program.call(
        "attention",
        scope.path("core"),
        q,
        k,
        v,
        caches={"kv": page_spec.name},
        group=page_spec.group,  # type: ignore[union-attr]
        scale=config.scale,
        window=config.window,
    )
    if gate:
        (opened,) = scope.call("activation", "gate", gate[0], kind="sigmoid")
        (y,) = scope.call("multiply", "gated", y, opened)
    return scope.linear(scope.call("flatten", "heads", y)[0], "dense")


def gated_delta(scope: Scope, x: str, config: GatedDeltaConfig, shared: Shared) -> str:
    """Gated DeltaNet: q, k, v through a convolution, the gated delta rule, a gated norm for each head."""
    heads, v_shape = config.num_v_heads, (config.num_v_heads, config.head_v_dim)
    k_shape = (config.num_k_heads, config.head_k_dim)
    qkv, z, b, a = scope.split(scope.linear(x, "in_proj"), "split", (config.conv_dim,), v_shape, (heads,), (heads,))
    q, k, v = scope.split(scope.conv(qkv), "split_qkv", k_shape, k_shape, v_shape)
    (y,) = scope.program.call(
        "linear_attention",
        scope.path("core"),
        q,
        k,
        v,
        a,
        b,
        weights={name: scope.path(name) for name in ("A_log", "dt_bias")},
        caches={"state": scope.path("state")},
        rule="gated_delta",
        scale=config.head_k_dim**-0.5,
        l2_norm=True,
    )
    y = scope.norm(y, "norm", gate=z)
    return scope.linear(scope.call("flatten", "heads", y)[0], "out_proj")


def mamba1(scope: Scope, x: str, config: Mamba1Config, shared: Shared) -> str:
    """Mamba: convolution, input-dependent dt, B and C, selective scan, SiLU gate."""
    u, z = scope.split(scope.linear(x, "in_proj"), "split", (config.inner,), (config.inner,))
    u = scope.conv(u)
    dt, B, C = scope.split(
        scope.linear(u, "x_proj"), "split_dt_bc", (config.dt_rank,), (config.d_state,), (config.d_state,)
    )
    if config.dt_bc_norm:
        dt, B, C = scope.norm(dt, "dt_norm"), scope.norm(B, "B_norm"), scope.norm(C, "C_norm")
    (y,) = scope.program.call(
        "selective_scan",
        scope.path("core"),
        u,
        scope.linear(dt, "dt_proj"),
        B,
        C,
        weights={name: scope.path(name) for name in ("A_log", "D", "dt_bias")},
        caches={"state": scope.path("state")},
    )
    (opened,) = scope.call("activation", "gate", z, kind="silu")
    (y,) = scope.call("multiply", "gated", y, opened)
    return scope.linear(y, "out_proj")


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


MIXERS: dict[str, Callable[[Scope, str, Any, Shared], str]] = {
    function.__name__: function for function in (attention, gated_delta, mamba1, mamba2)
}
