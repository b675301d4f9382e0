"""Attention routed by length: softmax below a position, linear attention from there on, over two caches.

The softmax part never needs a token at or beyond the limit, so its cache ends there; the linear part sums all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer_below(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    q, k, v = inputs
    require(k.shape == v.shape and q.shape[2] == k.shape[2], f"q {q.shape}, k {k.shape} and v {v.shape} do not fit")
    require(int(q.shape[1]) % int(k.shape[1]) == 0, f"{k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    require(attributes["limit"] >= 1, f"limit={attributes['limit']} is not positive")
    return [q]


def _infer_from(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    y, q, k, v = inputs
    require(y.shape == q.shape, f"y {y.shape} and q {q.shape} differ")
    return _infer_below([q, k, v], weights, attributes)


def _flops_below(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    _, heads, head_dim = inputs[0].shape
    attended = min(load.attended, load.tokens * int(attributes["limit"]))
    return 4 * attended * int(heads) * int(head_dim)


def _flops_from(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    _, q, k, _ = inputs
    return 2 * int(q.shape[2]) * (load.size(q.shape) + load.size(k.shape))


SPECS = (
    OpSpec(
        name="attention_below",
        inputs=("q", "k", "v"),  # [T, heads, head_dim], [T, kv_heads, head_dim] twice
        caches=("kv",),  # [pages, page_size, 2, kv_heads, head_dim]
        attributes=("group", "scale", "limit"),
        step_inputs=("positions", "cu_seqlens", "context_lens", "block_tables"),
        infer=_infer_below,
        flops=_flops_below,
    ),
    OpSpec(
        name="linear_attention_from",
        inputs=("y", "q", "k", "v"),  # [T, heads, head_dim] twice, [T, kv_heads, head_dim] twice
        caches=("state",),  # [slots, kv_heads, head_dim, head_dim + 1]: sums of f(k) v^T, then of f(k)
        attributes=("limit",),
        step_inputs=("positions", "cu_seqlens", "state_src", "state_dst"),
        infer=_infer_from,
        flops=_flops_from,
        aliases=((0, 0),),
    ),
)
