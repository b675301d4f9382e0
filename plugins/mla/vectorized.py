"""Rows of one token together in the latent space, as one head of keys; longer rows over decompressed keys and values.

up_k is absorbed into the queries and up_v into the result, so a decoded token reads nothing but the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.paged import gather, store
from hybridtrt.plugins.ragged import Step


def mla(
    step: Step,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    *,
    up: Tensor,
    kv: Tensor,
    group: str,
    scale: float,
) -> Tensor:
    """Attend to the cached tokens and to this step's, `[T, heads, v_dim]`."""
    store(step, torch.cat([latent, k_rope[:, 0]], dim=-1), kv, group)
    heads, nope_dim = q_nope.shape[1:]
    rank = latent.shape[1]
    by_head = up.unflatten(0, (heads, -1))
    up_k, up_v = by_head[:, :nope_dim], by_head[:, nope_dim:]
    out = q_nope.new_empty(len(q_nope), heads, up_v.shape[1])
    table = step.block_tables[group]
    if len(step.single_rows):
        single, rows = step.single_tokens, step.single_rows
        cached, visible = gather(step.context_lens[rows, None], table[rows], kv, q_nope.dtype)
        absorbed = torch.cat([torch.einsum("nhd,hdr->nhr", q_nope[single], up_k), q_rope[single]], dim=-1)
        attended = F.scaled_dot_product_attention(absorbed, cached, cached[..., :rank], attn_mask=visible, scale=scale)
        out[single] = torch.einsum("nhr,hdr->nhd", attended, up_v)
    queries = torch.cat([q_nope, q_rope], dim=-1)
    for row, tokens in step.slices():
        if tokens.stop - tokens.start > 1:
            cached, visible = gather(step.positions[None, tokens], table[[row]], kv, q_nope.dtype)
            compressed, rotary = cached[0].split([rank, q_rope.shape[2]], dim=-1)
            expanded = F.linear(compressed, up).unflatten(1, (heads, -1))  # [length, heads, nope_dim + v_dim]
            keys = torch.cat([expanded[..., :nope_dim], rotary[:, None].expand(-1, heads, -1)], dim=-1)
            q, k, v = (part.transpose(0, 1) for part in (queries[tokens], keys, expanded[..., nope_dim:]))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
            out[tokens] = attended.transpose(0, 1)
    return out
