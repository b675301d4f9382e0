"""y_t = sum_j w_tj (down_e h + down_bias_e) with h = act(up_e x_t + up_bias_e), one token and choice after another."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.pointwise.reference import activate, glu
from hybridtrt.plugins.ragged import Step


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
            h = up[expert].to(x.dtype) @ x[t]
            if up_bias is not None:
                h = h + up_bias[expert]
            h = down[expert].to(x.dtype) @ (glu(h, activation, clamp=clamp) if gated else activate(h, activation))
            if down_bias is not None:
                h = h + down_bias[expert]
            y[t] += weights[t, j] * h
    return y
