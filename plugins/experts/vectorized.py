"""Tokens sorted by expert, then one pair of GEMMs for each expert that has any."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.experts.reference import matrix
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
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    activation: str,
    gated: bool = True,
    clamp: float | None = None,
) -> Tensor:
    """`[T, hidden]` to the same. Numbers beyond the last expert stand for none."""
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    scales = weights.flatten()[order].unsqueeze(-1)
    counts = experts.flatten().bincount(minlength=up.shape[0]).tolist()
    y = torch.zeros_like(x)
    end = 0
    for expert, count in enumerate(counts[: up.shape[0]]):
        if count:
            start, end = end, end + count
            w = matrix(up, up_scale, expert, x.shape[1], x.dtype)
            h = F.linear(x[tokens[start:end]], w, None if up_bias is None else up_bias[expert])
            h = glu(h, activation, clamp=clamp) if gated else activate(h, activation)
            w = matrix(down, down_scale, expert, h.shape[1], x.dtype)
            result = F.linear(h, w, None if down_bias is None else down_bias[expert])
            y.index_add_(0, tokens[start:end], result * scales[start:end])
    return y
