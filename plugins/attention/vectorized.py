"""Paged attention: rows of one token together over their gathered pages, longer rows one after another.

Scores go through torch's fused kernel, except with sinks or a softcap, which it does not know. Pages that lie wholly
before a window are not read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.paged import gather, store
from hybridtrt.plugins.ragged import Step

TILE = 128  # queries whose scores are held at once where they are not fused


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

    def attend(queries: Tensor, rows: Tensor) -> Tensor:
        positions = step.context_lens[rows, None] + torch.arange(queries.shape[1])  # [n, L]
        cached, visible = gather(positions, step.block_tables[group][rows], kv, q.dtype, window)
        keys, values = (part.transpose(1, 2) for part in cached.unbind(2))  # [n, kv_heads, length, head_dim]
        queries = queries.transpose(1, 2)
        if sinks is None and softcap is None:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=True
            )
        else:
            tiles = zip(queries.split(TILE, dim=2), visible.split(TILE, dim=1), strict=True)
            attended = torch.cat([_unfused(t, keys, values, m, scale, softcap, sinks) for t, m in tiles], dim=2)
        return attended.transpose(1, 2)

    if len(step.single_rows):
        out[step.single_tokens] = attend(q[step.single_tokens, None], step.single_rows)[:, 0]
    for row, tokens in step.slices():
        if tokens.stop - tokens.start > 1:
            out[tokens] = attend(q[None, tokens], torch.tensor([row]))[0]
    return out


def _unfused(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`[n, heads, L, head_dim]` against keys and values, with a softcap, sinks, or both."""
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, heads of each, L, head_dim]
    scores = grouped @ keys.unsqueeze(2).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.to(q.dtype).reshape(1, keys.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    attended: Tensor = weights @ values.unsqueeze(2)
    return attended.flatten(1, 2)
