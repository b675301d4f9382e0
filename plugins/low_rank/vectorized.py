"""Two linear recurrences: k against E read by q gives the scores, E against v read by their softmax the result."""

from __future__ import annotations

from torch import Tensor

from hybridtrt.plugins.chunked import linear_recurrence
from hybridtrt.plugins.ragged import Step


def low_rank_attention(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    projection: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """`[T, heads, head_dim]`; `projection` E has a row a position."""
    e = projection[step.positions].to(q.dtype)[:, None].expand(-1, k.shape[1], -1)
    scores = linear_recurrence(step, q * scale, k, e, None, None, keys)
    return linear_recurrence(step, scores.softmax(-1), e, v, None, None, values)
