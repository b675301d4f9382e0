"""y[t] = sum_w weight[w] * x[t - width + 1 + w], one token after another through the state.

Depthwise the product is that of each channel, else weight[w] is a matrix for each group of channels.
"""

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
            y[t] = sum(tap(window[None, :, w], weight[..., w])[0] for w in range(window.shape[1]))
            recent = window[:, 1:]
        state[step.state_dst[row]] = recent.to(state.dtype)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y


def tap(x: Tensor, weight: Tensor) -> Tensor:
    """One tap's share of tokens `[T, channels]`, with a weight `[channels]` or `[channels, channels of a group]`."""
    if weight.dim() == 1:
        return x * weight
    size = weight.shape[1]
    return torch.einsum("tgi,goi->tgo", x.unflatten(1, (-1, size)), weight.unflatten(0, (-1, size))).flatten(1)
