"""Attention routed by length."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import LengthRoutedConfig


def length_routed(scope: Scope, x: str, config: LengthRoutedConfig, shared: Shared) -> str:
    """Softmax attention below the limit, with rotary positions; linear attention, without them, from there on."""
    q_shape, kv_shape = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    q, k, v = scope.split(scope.linear(x, "qkv"), "split", q_shape, kv_shape, kv_shape)
    turned_q, turned_k = q, k
    if config.rope is not None:
        (turned_q,) = scope.call("rotary", "q_rotary", q, *shared.ropes[config.rope])
        (turned_k,) = scope.call("rotary", "k_rotary", k, *shared.ropes[config.rope])
    kv, state = config.caches(scope.prefix)
    (y,) = scope.program.call(
        "attention_below",
        scope.path("below"),
        turned_q,
        turned_k,
        v,
        caches={"kv": kv.name},
        group=kv.group,  # type: ignore[union-attr]
        scale=config.head_dim**-0.5,
        limit=config.limit,
    )
    (y,) = scope.program.call(
        "linear_attention_from", scope.path("from"), y, q, k, v, caches={"state": state.name}, limit=config.limit
    )
    return scope.linear(scope.call("flatten", "heads", y)[0], "dense")
