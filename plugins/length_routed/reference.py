"""Softmax attention at positions p < limit, and at the others f(q) S / f(q) z with S = sum f(k) v^T, z = sum f(k).

f(x) = elu(x) + 1 (arXiv 2006.16236), and both sums run over all tokens s <= p. One token after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def attention_below(
    step: Step, q: Tensor, k: Tensor, v: Tensor, *, kv: Tensor, group: str, scale: float, limit: int
) -> Tensor:
    """Causal softmax attention of the tokens at positions below `limit`; zero for the others, which are not cached."""
    out = torch.zeros_like(q)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    for row, tokens in step.slices():
        pages = step.block_tables[group][row]
        for t in range(tokens.start, tokens.stop):
            position = int(step.positions[t])
            if position >= limit:
                break
            kv[pages[position // kv.shape[1]], position % kv.shape[1]] = torch.stack([k[t], v[t]]).to(kv.dtype)
            keys, values = kv[pages].flatten(0, 1)[: position + 1].to(q.dtype).unbind(1)
            scores = torch.einsum("hgd,shd->hgs", q[t].unflatten(0, heads), keys) * scale
            out[t] = torch.einsum("hgs,shd->hgd", scores.softmax(-1), values).flatten(0, 1)
    return out


def linear_attention_from(
    step: Step, y: Tensor, q: Tensor, k: Tensor, v: Tensor, *, state: Tensor, limit: int
) -> Tensor:
    """y with the tokens at positions from `limit` on replaced by their linear attention; the state sums all tokens."""
    out = y.clone()
    q, k, v = features(q), features(k), with_ones(v)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    for row, tokens in step.slices():
        s = state[step.state_src[row]].to(q.dtype)  # [kv_heads, head_dim, head_dim + 1]
        for t in range(tokens.start, tokens.stop):
            s = s + k[t][:, :, None] * v[t][:, None, :]
            if step.positions[t] >= limit:
                sums = torch.einsum("hgk,hkv->hgv", q[t].unflatten(0, heads), s).flatten(0, 1)
                out[t] = sums[:, :-1] / sums[:, -1:]
        state[step.state_dst[row]] = s.to(state.dtype)
    return out


def features(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    return F.elu(x) + 1.0


def with_ones(v: Tensor) -> Tensor:
    """v with one more channel of ones, whose sum is the normaliser."""
    return F.pad(v, (0, 1), value=1.0)
