"""h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t, where a_t = exp(-8 r_t softplus(decay)), token after token.

i and r are the sigmoids of the input and the recurrence gate. The first token of a sequence enters unscaled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step

SHARPNESS = 8.0


def gated(
    step: Step,
    x: Tensor,
    input_gate: Tensor,
    input_bias: Tensor,
    recurrence_gate: Tensor,
    recurrence_bias: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor]:
    """log a_t and what token t adds to the state, `[T, channels]` each."""

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        heads = x.unflatten(1, weight.shape[:2]).transpose(0, 1)  # [heads, T, width]
        return torch.sigmoid((heads @ weight).transpose(0, 1).flatten(1) + bias)

    log_a = -SHARPNESS * gate(recurrence_gate, recurrence_bias) * F.softplus(decay)
    scale = torch.sqrt(-torch.expm1(2 * log_a)).masked_fill(step.positions[:, None] == 0, 1.0)
    return log_a, scale * gate(input_gate, input_bias) * x


def rg_lru(
    step: Step,
    x: Tensor,
    *,
    input_gate: Tensor,
    input_bias: Tensor,
    recurrence_gate: Tensor,
    recurrence_bias: Tensor,
    decay: Tensor,
    state: Tensor,
) -> Tensor:
    """`[T, channels]` to the same."""
    log_a, added = gated(step, x, input_gate, input_bias, recurrence_gate, recurrence_bias, decay)
    y = torch.empty_like(x)
    for row, tokens in step.slices():
        h = state[step.state_src[row]].to(x.dtype)  # [channels]
        for t in range(tokens.start, tokens.stop):
            h = log_a[t].exp() * h + added[t]
            y[t] = h
        state[step.state_dst[row]] = h.to(state.dtype)
    return y
