"""h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = h_t C_t + D x_t with A = -exp(A_log), token after token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def selective_scan(
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
) -> Tensor:
    """`[T, channels]` to the same."""
    A = -A_log.exp()
    dt = F.softplus(dt + dt_bias)
    repeats = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(repeats, 1), C.repeat_interleave(repeats, 1)  # [T, channels, N]
    y = torch.empty_like(x)
    for row, tokens in step.slices():
        h = state[step.state_src[row]].to(x.dtype)  # [channels, N]
        for t in range(tokens.start, tokens.stop):
            h = (dt[t][:, None] * A).exp() * h + (dt[t] * x[t])[:, None] * B[t]
            y[t] = (h * C[t]).sum(1) + D * x[t]
        state[step.state_dst[row]] = h.to(state.dtype)
    return y
