"""S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t with A = -exp(A_log), token after token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def time_step(dt: Tensor, dt_bias: Tensor, dt_min: float, dt_max: float | None) -> Tensor:
    """softplus(dt + dt_bias), clamped to [dt_min, dt_max]."""
    return F.softplus(dt + dt_bias).clamp(dt_min, dt_max)


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
    decay = (-A_log.exp() * dt).exp()
    repeats = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(repeats, 1), C.repeat_interleave(repeats, 1)
    y = torch.empty_like(x)
    for row, tokens in step.slices():
        s = state[step.state_src[row]].to(x.dtype)  # [heads, P, N]
        for t in range(tokens.start, tokens.stop):
            s = s * decay[t][:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * B[t][:, None, :]
            y[t] = torch.einsum("hpn,hn->hp", s, C[t]) + D[:, None] * x[t]
        state[step.state_dst[row]] = s.to(state.dtype)
    return y
