"""Chunked for prefill, stepped for decode."""

from __future__ import annotations

from torch import Tensor

from hybridtrt.plugins.chunked import linear_recurrence
from hybridtrt.plugins.linear_attention.reference import prepare
from hybridtrt.plugins.ragged import Step


def linear_attention(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state: Tensor,
    rule: str,
    scale: float,
    l2_norm: bool = False,
    decay_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """`[T, heads, V]` from q, k `[T, key_heads, K]` and v `[T, heads, V]`."""
    q, k, g, beta = prepare(q, k, gates, A_log, dt_bias, rule, scale, l2_norm, decay_bound, beta_scale)
    return linear_recurrence(step, q, k, v, g, beta, state, step.token_slots)
