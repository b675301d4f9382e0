"""All rows at once: each row's state is laid before its tokens, then the taps are shifted slices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.causal_conv.reference import tap
from hybridtrt.plugins.ragged import Step


def causal_conv(
    step: Step, x: Tensor, *, weight: Tensor, bias: Tensor | None = None, state: Tensor, activation: str | None = None
) -> Tensor:
    """`[T, channels]` to the same; the inputs before the chunk come from the state, which is zero at the start."""
    channels, past = state.shape[1:]
    # Row b of `padded` is its `past` state entries, then its tokens; both kinds of entries keep their order.
    token_at = torch.arange(step.num_tokens) + (step.token_rows + 1) * past
    ends = step.cu_seqlens[1:] + past * torch.arange(1, step.num_sequences + 1)
    before = torch.arange(past)
    state_at = (step.cu_seqlens[:-1] + past * torch.arange(step.num_sequences))[:, None] + before
    padded = x.new_empty(step.num_tokens + past * step.num_sequences, channels)
    padded[token_at] = x
    padded[state_at] = state[step.state_src].transpose(1, 2).to(x.dtype)
    state[step.state_dst] = padded[ends[:, None] - past + before].transpose(1, 2).to(state.dtype)
    y = tap(x, weight[..., past])
    for w in range(past):
        earlier = padded[token_at - past + w]
        if weight.dim() == 2:
            y.addcmul_(earlier, weight[:, w])
        else:
            y += tap(earlier, weight[..., w])
    if bias is not None:
        y += bias
    return F.silu(y) if activation == "silu" else y
