"""Causal softmax attention."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import AttentionConfig


def attention(scope: Scope, x: str, config: AttentionConfig, shared: Shared) -> str:
    """Grouped-query attention; QK norm, then rotary, then an optional sigmoid gate on the output."""
    q_shape, kv_shape = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    gates = [q_shape] if config.output_gate else []
    if config.qk_norm == "full":
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, *gate, k, v = scope.split(scope.linear(x, "qkv"), "split", (q_width,), *gates, (kv_width,), kv_shape)
        (q,) = scope.split(scope.norm(q, "q_norm"), "q_heads", q_shape)
        (k,) = scope.split(scope.norm(k, "k_norm"), "k_heads", kv_shape)
    else:
        q, *gate, k, v = scope.split(scope.linear(x, "qkv"), "split", q_shape, *gates, kv_shape, kv_shape)
    if config.qk_norm == "head":
        q, k = scope.norm(q, "q_norm"), scope.norm(k, "k_norm")
    if config.head_gate:
        gate = [*gate, *scope.split(scope.linear(x, "head_gate"), "head_gates", (config.num_heads, 1))]
    if config.rope is not None:
        (q,) = scope.call("rotary", "q_rotary", q, *shared.ropes[config.rope])
        (k,) = scope.call("rotary", "k_rotary", k, *shared.ropes[config.rope])
    (page_spec,) = config.caches(scope.prefix)
    (y,) = scope.program.call(
        "attention",
        scope.path("core"),
        q,
        k,
        v,
        weights={"sinks": scope.weight("sinks")} if config.sinks else {},
        caches={"kv": page_spec.name},
        group=page_spec.group,
        scale=config.scale,
        window=config.window,
        softcap=config.softcap,
    )
    for i, closed in enumerate(gate):
        (opened,) = scope.call("activation", f"gate_{i}", closed, kind="sigmoid")
        (y,) = scope.call("multiply", f"gated_{i}", y, opened)
    return scope.linear(scope.call("flatten", "heads", y)[0], "dense")
