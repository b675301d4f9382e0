"""K_t = sum of E[s] k_s^T and V_t = sum of E[s] v_s^T over s <= t, y_t = softmax(scale * q_t K_t^T) V_t."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def low_rank_attention(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    projection: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """`[T, heads, head_dim]`; `projection` E has a row a position."""
    out = torch.empty_like(q)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    for row, tokens in step.slices():
        source, target = step.state_src[row], step.state_dst[row]
        K, V = keys[source].to(q.dtype), values[source].to(q.dtype)  # [kv_heads, head_dim, rank], [.., rank, head_dim]
        for t in range(tokens.start, tokens.stop):
            e = projection[step.positions[t]].to(q.dtype)
            K = K + k[t][:, :, None] * e
            V = V + e[:, None] * v[t][:, None, :]
            scores = torch.einsum("hgd,hdr->hgr", q[t].unflatten(0, heads), K) * scale
            out[t] = torch.einsum("hgr,hrd->hgd", scores.softmax(-1), V).flatten(0, 1)
        keys[target], values[target] = K.to(keys.dtype), V.to(values.dtype)
    return out
