"""Decode in one step; prefill as an inclusive scan by doubling inside chunks, state passed from chunk to chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.rg_lru.reference import gated
from hybridtrt.plugins.scan import inclusive_scan

CHUNK = 64


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
    if len(step.single_rows):
        at = step.single_tokens
        h = state[step.state_src[step.single_rows]].to(x.dtype)
        y[at] = log_a[at].exp() * h + added[at]
        state[step.state_dst[step.single_rows]] = y[at].to(state.dtype)
    chunks = step.chunks(CHUNK)
    if chunks is not None:
        h = state[step.state_src[chunks.rows]].to(x.dtype)
        a, value = chunks.gather(log_a).exp(), chunks.gather(added)  # padding: a = 1 keeps the state
        for rows, numbers in chunks.waves:
            decays, out = a[numbers], value[numbers]
            out[:, 0] += decays[:, 0] * h[rows]
            inclusive_scan(decays, out)
            value[numbers], h[rows] = out, out[:, -1]
        chunks.scatter(value, y)
        state[step.state_dst[chunks.rows]] = h.to(state.dtype)
    return y
