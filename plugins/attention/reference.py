"""softmax(scale * q k^T + causal mask) v, one sequence and one head group after another."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.paged import store
from hybridtrt.plugins.ragged import Step


def attention(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None = None,
    kv: Tensor,
    group: str,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend to the cached tokens and to this step's."""
    store(step, torch.stack([k, v], dim=1), kv, group)
    out = torch.empty_like(q)
    per_group = q.shape[1] // k.shape[1]
    for row, tokens in step.slices():
        positions = step.positions[tokens]
        first = 0 if window is None else max(0, int(positions[0]) - window + 1)
        seen = torch.arange(first, int(positions[-1]) + 1)
        pages = step.block_tables[group][row, seen // kv.shape[1]]
        cached = kv[pages, seen % kv.shape[1]].to(q.dtype)  # [seen, 2, kv_heads, head_dim]
        distance = positions[:, None] - seen
        masked = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        for head in range(q.shape[1]):
            keys, values = cached[:, :, head // per_group].unbind(1)
            scores = q[tokens, head] @ keys.T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(masked, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(q.dtype).expand(len(scores), 1)], dim=1)
            out[tokens, head] = scores.softmax(-1)[:, : len(seen)] @ values
    return out
