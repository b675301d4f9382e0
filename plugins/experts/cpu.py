"""Tokens sorted by expert, then one pair of GEMMs for each expert that has any."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.pointwise.reference import activate
from hybridtrt.plugins.ragged import Step


def experts(
    step: Step, x: Tensor, weights: Tensor, experts: Tensor, *, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """`[T, hidden]` to the same."""
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    scales = weights.flatten()[order].unsqueeze(-1)
    counts = experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    y = torch.zeros_like(x)
    end = 0
    for expert, count in enumerate(counts):
        if count:
            start, end = end, end + count
            gate, up = F.linear(x[tokens[start:end]], gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(activate(gate, activation) * up, down[expert])
            y.index_add_(0, tokens[start:end], result * scales[start:end])
    return y
