"""Decode in one step; prefill as an inclusive scan by doubling inside chunks, state passed from chunk to chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.scan import inclusive_scan

CHUNK = 32


def selective_scan(
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
) -> Tensor:
    """`[T, channels]` to the same."""
    A = -A_log.exp()
    dt = F.softplus(dt + dt_bias)
    grouped = (B.shape[1], x.shape[1] // B.shape[1])
    y = torch.empty_like(x)
    if len(step.single_rows):
        at = step.single_tokens
        h = state[step.state_src[step.single_rows]].to(x.dtype)
        h = h * (dt[at].unsqueeze(-1) * A).exp() + _outer((dt[at] * x[at]).unflatten(-1, grouped), B[at])
        y[at] = _contract(h.unflatten(-2, grouped), C[at])
        state[step.state_dst[step.single_rows]] = h.to(state.dtype)
    chunks = step.chunks(CHUNK)
    if chunks is not None:
        h = state[step.state_src[chunks.rows]].to(x.dtype)
        steps, inputs, b, c = (chunks.gather(value) for value in (dt, dt * x, B, C))  # padding: dt = 0 keeps the state
        out = x.new_empty(*chunks.index.shape, x.shape[1])
        for rows, numbers in chunks.waves:
            decay = (steps[numbers].unsqueeze(-1) * A).exp()  # [n, C, channels, N]
            value = _outer(inputs[numbers].unflatten(-1, grouped), b[numbers])
            value[:, 0] += decay[:, 0] * h[rows]
            inclusive_scan(decay, value)
            out[numbers] = _contract(value.unflatten(-2, grouped), c[numbers])
            h[rows] = value[:, -1]
        chunks.scatter(out, y)
        state[step.state_dst[chunks.rows]] = h.to(state.dtype)
    return y.addcmul_(x, D)


def _outer(x: Tensor, b: Tensor) -> Tensor:
    """x `[..., groups, channels]` times b `[..., groups, N]` of its group: `[..., groups * channels, N]`."""
    return (x.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-3, -2)


def _contract(h: Tensor, c: Tensor) -> Tensor:
    """h `[..., groups, channels, N]` with c `[..., groups, N]` of its group: `[..., groups * channels]`."""
    return (h @ c.unsqueeze(-1)).squeeze(-1).flatten(-2)
