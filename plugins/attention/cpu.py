"""Paged attention: rows of one token together over their gathered pages, longer rows by torch's fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.attention.reference import store
from hybridtrt.plugins.ragged import Step


def attention(
    step: Step, q: Tensor, k: Tensor, v: Tensor, *, kv: Tensor, group: str, scale: float, window: int | None = None
) -> Tensor:
    """Attend to the cached tokens and to this step's; a window of W sees W tokens, the current one included."""
    store(step, k, v, kv, group)
    out = torch.empty_like(q)
    if len(step.single_rows):
        out[step.single_tokens] = _attend(
            step, q[step.single_tokens, None], step.single_rows, kv, group, scale, window
        )[:, 0]
    for row, tokens in step.slices():
        if tokens.stop - tokens.start > 1:
            out[tokens] = _attend(step, q[None, tokens], torch.tensor([row]), kv, group, scale, window)[0]
    return out


def _attend(step: Step, q: Tensor, rows: Tensor, kv: Tensor, group: str, scale: float, window: int | None) -> Tensor:
    """`n` rows of `L` tokens each, `[n, L, heads, head_dim]`, against all their pages, padded to the longest."""
    positions = step.context_lens[rows, None] + torch.arange(q.shape[1])  # [n, L]
    length = int(positions.max()) + 1
    pages = step.block_tables[group][rows, : -(-length // kv.shape[1])]
    cached = kv[pages].flatten(1, 2)[:, :length].to(q.dtype)  # [n, length, 2, kv_heads, head_dim]
    # Pages beyond a row's length may hold anything, NaN included: 0 * NaN would poison the sum.
    beyond = torch.arange(length) > positions[:, -1:]
    if beyond.any():
        cached = cached.masked_fill(beyond[..., None, None, None], 0.0)
    keys, values = (part.transpose(1, 2) for part in cached.unbind(2))
    distance = positions[..., None] - torch.arange(length)
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=True
    ).transpose(1, 2)
