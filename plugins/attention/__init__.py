"""Causal softmax attention with grouped heads over a paged KV cache.

A window of W sees W tokens, the current one included. A softcap (Gemma 2, arXiv 2408.00118) squashes the scaled scores.
Sinks (StreamingLLM, arXiv 2309.17453) are one more score a head in the softmax, without a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    q, k, v = inputs
    require(len(q.shape) == len(k.shape) == 3 and k.shape == v.shape, f"q {q.shape}, k {k.shape}, v {v.shape} differ")
    require(q.shape[2] == k.shape[2], f"head_dim of q {q.shape} and k {k.shape} differ")
    require(int(q.shape[1]) % int(k.shape[1]) == 0, f"{k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    sinks = weights.get("sinks")
    require(sinks is None or sinks.shape == (q.shape[1],), f"sinks do not fit q {q.shape}")
    return [q]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    _, heads, head_dim = inputs[0].shape
    return 4 * load.attended * int(heads) * int(head_dim)


SPECS = (
    OpSpec(
        name="attention",
        inputs=("q", "k", "v"),  # [T, heads, head_dim], [T, kv_heads, head_dim] twice
        optional_weights=("sinks",),  # [heads]
        caches=("kv",),  # [pages, page_size, 2, kv_heads, head_dim]
        attributes=("group", "scale", "window", "softcap"),
        step_inputs=("positions", "cu_seqlens", "context_lens", "block_tables"),
        infer=_infer,
        flops=_flops,
    ),
)
