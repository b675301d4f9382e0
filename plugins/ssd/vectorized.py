"""The linear recurrence with q = C, k = B, v = dt x and log decay dt A; the state is kept transposed."""

from __future__ import annotations

from torch import Tensor

from hybridtrt.plugins.chunked import linear_recurrence
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.ssd.reference import time_step


def ssd(
    step: Step,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    dt_min: float = 0.0,
    dt_max: float | None = None,
) -> Tensor:
    """`[T, heads, P]` to the same."""
    dt = time_step(dt, dt_bias, dt_min, dt_max)
    g = (-A_log.exp() * dt).unsqueeze(-1)
    y = linear_recurrence(step, C, B, x * dt.unsqueeze(-1), g, None, state.transpose(2, 3))
    return y.addcmul_(x, D[:, None])
