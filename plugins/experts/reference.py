"""y_t = sum_j w_tj down_e (act(gate_e x_t) * up_e x_t) with e = experts_tj, one token and one choice after another."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.pointwise.reference import activate
from hybridtrt.plugins.ragged import Step


def experts(
    step: Step, x: Tensor, weights: Tensor, experts: Tensor, *, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """`[T, hidden]` to the same."""
    y = torch.zeros_like(x)
    for t, choices in enumerate(experts.tolist()):
        for j, expert in enumerate(choices):
            gate, up = (gate_up[expert].to(x.dtype) @ x[t]).chunk(2)
            y[t] += weights[t, j] * (down[expert].to(x.dtype) @ (activate(gate, activation) * up))
    return y
