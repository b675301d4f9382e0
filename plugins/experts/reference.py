"""y_t = sum_j w_tj (down_e h + down_bias_e) with h = act(up_e x_t + up_bias_e), one token and choice after another."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.pointwise.reference import activate, glu
from hybridtrt.plugins.ragged import Step


def matrix(numbers: Tensor, scales: Tensor | None, expert: int, width: int, dtype: torch.dtype) -> Tensor:
    """The matrix `[out, width]` of an expert that numbers and scales stand for, in the forms of `quantized.Form`."""
    found = numbers[expert]
    if scales is None:
        return found.to(dtype)
    by = scales[expert].to(dtype)
    if by.dim() < 2:
        return found.to(dtype) * by.unsqueeze(-1)
    groups = found.unflatten(1, (by.shape[1], -1))
    if found.shape[1] != width:
        groups = torch.cat([((groups & 15) ^ 8) - 8, groups >> 4], 2)
    whole: Tensor = groups.to(dtype) * by.unsqueeze(2)
    return whole.flatten(1)


def experts(
    step: Step,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    activation: str,
    gated: bool = True,
    clamp: float | None = None,
) -> Tensor:
    """`[T, hidden]` to the same; act is `glu` of gate and up where the experts are gated."""
    y = torch.zeros_like(x)
    for t, choices in enumerate(experts.tolist()):
        for j, expert in enumerate(choices):
            if expert >= up.shape[0]:
                continue  # stands for no expert
            h = matrix(up, up_scale, expert, x.shape[1], x.dtype) @ x[t]
            if up_bias is not None:
                h = h + up_bias[expert]
            h = glu(h, activation, clamp=clamp) if gated else activate(h, activation)
            h = matrix(down, down_scale, expert, len(h), x.dtype) @ h
            if down_bias is not None:
                h = h + down_bias[expert]
            y[t] += weights[t, j] * h
    return y
