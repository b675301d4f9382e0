"""Causal attention over keys and values compressed along the sequence to a fixed number of rows (after Linformer,
arXiv 2006.04768): each position adds its key and value to the rows by the weights of its row of a learned table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    q, k, v = inputs
    require(k.shape == v.shape and q.shape[2] == k.shape[2], f"q {q.shape}, k {k.shape} and v {v.shape} do not fit")
    require(int(q.shape[1]) % int(k.shape[1]) == 0, f"{k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    require(len(weights["projection"].shape) == 2, f"projection {weights['projection'].shape} is not [positions, rank]")
    return [q]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    q, k, v = inputs
    rank = int(weights["projection"].shape[1])
    return 2 * rank * (2 * load.size(q.shape) + load.size(k.shape) + load.size(v.shape))


def _rows_read(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    """A row a token."""
    return load.tokens


SPECS = (
    OpSpec(
        name="low_rank_attention",
        inputs=("q", "k", "v"),  # [T, heads, head_dim], [T, kv_heads, head_dim] twice
        weights=("projection",),  # [positions, rank]
        caches=("keys", "values"),  # [slots, kv_heads, head_dim, rank], [slots, kv_heads, rank, head_dim]
        attributes=("scale",),
        step_inputs=("positions", "cu_seqlens", "state_src", "state_dst"),
        infer=_infer,
        flops=_flops,
        rows_read=_rows_read,
    ),
)
