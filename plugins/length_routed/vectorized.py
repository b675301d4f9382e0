"""Paged attention over a step of the tokens below the limit; the chunked linear recurrence over all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.attention.vectorized import attention
from hybridtrt.plugins.chunked import linear_recurrence
from hybridtrt.plugins.length_routed.reference import features, with_ones
from hybridtrt.plugins.ragged import Step


def attention_below(
    step: Step, q: Tensor, k: Tensor, v: Tensor, *, kv: Tensor, group: str, scale: float, limit: int
) -> Tensor:
    """Causal softmax attention of the tokens at positions below `limit`; zero for the others, which are not cached."""
    tokens, below = step.below(limit)
    out = torch.zeros_like(q)
    if len(tokens):
        out[tokens] = attention(below, q[tokens], k[tokens], v[tokens], kv=kv, group=group, scale=scale)
    return out


def linear_attention_from(
    step: Step, y: Tensor, q: Tensor, k: Tensor, v: Tensor, *, state: Tensor, limit: int
) -> Tensor:
    """y with the tokens at positions from `limit` on replaced by their linear attention; the state sums all tokens."""
    sums = linear_recurrence(step, features(q), features(k), with_ones(v), None, None, state)
    routed = (step.positions >= limit)[:, None, None]
    return torch.where(routed, sums[..., :-1] / sums[..., -1:], y)
