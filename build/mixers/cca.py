"""Attention behind a convolution of queries and keys (compressed convolutional attention)."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import CcaConfig

LEAST_NORM = 1e-7  # shorter heads are not stretched to the full length


def cca(scope: Scope, x: str, config: CcaConfig, shared: Shared) -> str:
    """Convolutions over q and k plus the groups' means, norms, rotary, attention."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    q_shape, k_shape = (kv_heads, heads // kv_heads, dim), (kv_heads, 1, dim)
    qk, v = scope.split(scope.linear(x, "qkv"), "split", (config.conv_dim,), (config.half_v_dim,))
    delayed = scope.conv(scope.linear(x, "v_delayed"), activation=None, name="delay")
    (v,) = scope.call("concat", "v", v, delayed)
    (v,) = scope.split(v, "v_heads", (kv_heads, dim))
    q, k = scope.split(qk, "split_qk", q_shape, k_shape)
    mixed = scope.conv(scope.conv(qk, activation=None, name="depthwise"), activation=None, name="headwise")
    q_mixed, k_mixed = scope.split(mixed, "split_mixed", q_shape, k_shape)
    (both,) = scope.call("add", "q_and_k", q, k)
    (mean,) = scope.call("mean_heads", "q_and_k_mean", both)
    (q,) = scope.call("add", "q", q_mixed, both, scale=0.5)
    (k,) = scope.call("add", "k", k_mixed, mean, scale=0.5)
    q, k = (_unit(scope, part, f"{name}_norm", dim) for part, name in ((q, "q"), (k, "k")))
    k = scope.affine(k, "k_scale")
    q, k = _heads(scope, q, "q_heads", (heads, dim)), _heads(scope, k, "k_heads", (kv_heads, dim))
    if config.rope is not None:
        (q,) = scope.call("rotary", "q_rotary", q, *shared.ropes[config.rope])
        (k,) = scope.call("rotary", "k_rotary", k, *shared.ropes[config.rope])
    pages = config.caches(scope.prefix)[0]
    (y,) = scope.program.call(
        "attention",
        scope.path("core"),
        q,
        k,
        v,
        caches={"kv": pages.name},
        group=pages.group,  # type: ignore[union-attr]
        scale=dim**-0.5,
        window=config.window,
    )
    return scope.linear(scope.call("flatten", "heads", y)[0], "dense")


def _unit(scope: Scope, x: str, name: str, dim: int) -> str:
    """Each head at length sqrt(dim)."""
    return scope.call("rms_norm", name, x, eps=LEAST_NORM**2 / dim)[0]


def _heads(scope: Scope, x: str, name: str, shape: tuple[int, int]) -> str:
    """`[T, groups, heads of each, dim]` to `[T, heads, dim]`."""
    return scope.split(scope.call("flatten", f"{name}.flat", x)[0], name, shape)[0]
