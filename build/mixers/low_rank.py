"""Attention over keys and values of low rank."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import LowRankConfig


def low_rank(scope: Scope, x: str, config: LowRankConfig, shared: Shared) -> str:
    """Attention over the compressed rows, which take up this step's tokens one by one."""
    q_shape, kv_shape = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    q, k, v = scope.split(scope.linear(x, "qkv"), "split", q_shape, kv_shape, kv_shape)
    if config.rope is not None:
        (q,) = scope.call("rotary", "q_rotary", q, *shared.ropes[config.rope])
        (k,) = scope.call("rotary", "k_rotary", k, *shared.ropes[config.rope])
    keys, values = config.caches(scope.prefix)
    (y,) = scope.program.call(
        "low_rank_attention",
        scope.path("core"),
        q,
        k,
        v,
        weights={"projection": scope.weight("projection")},
        caches={"keys": keys.name, "values": values.name},
        scale=config.head_dim**-0.5,
    )
    return scope.linear(scope.call("flatten", "heads", y)[0], "dense")
