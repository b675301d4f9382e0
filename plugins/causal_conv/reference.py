"""y[t] = sum_w weight[w] * x[t - width + 1 + w], one token after another through the state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def causal_conv(
    step: Step, x: Tensor, *, weight: Tensor, bias: Tensor | None = None, state: Tensor, activation: str | None = None
) -> Tensor:
    """`[T, channels]` to the same; the inputs before the chunk come from the state, which is zero at the start."""
    y = torch.empty_like(x)
    for row, tokens in step.slices():
        recent = state[step.state_src[row]].to(x.dtype)  # [channels, width - 1]
        for t in range(tokens.start, tokens.stop):
            window = torch.cat([recent, x[t, :, None]], dim=1)
            y[t] = (window * weight).sum(1)
            recent = window[:, 1:]
        state[step.state_dst[row]] = recent.to(state.dtype)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y
