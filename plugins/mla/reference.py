"""k = [up_k c, r], v = up_v c for a token's latent c and rotary key r; softmax(scale * q k^T + causal mask) v."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.paged import store
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
    """Attend to the cached tokens and to this step's, `[T, heads, v_dim]`; one sequence and head after another."""
    store(step, torch.cat([latent, k_rope[:, 0]], dim=-1), kv, group)
    heads, nope_dim = q_nope.shape[1:]
    up = up.to(q_nope.dtype).unflatten(0, (heads, -1))
    out = q_nope.new_empty(len(q_nope), heads, up.shape[1] - nope_dim)
    for row, tokens in step.slices():
        positions = step.positions[tokens]
        length = int(positions[-1]) + 1
        cached = kv[step.block_tables[group][row]].flatten(0, 1)[:length].to(q_nope.dtype)
        compressed, rotary = cached.split([latent.shape[1], k_rope.shape[2]], dim=-1)
        masked = positions[:, None] < torch.arange(length)
        for head in range(heads):
            keys, values = (compressed @ up[head].T).tensor_split([nope_dim], dim=-1)
            scores = (q_nope[tokens, head] @ keys.T + q_rope[tokens, head] @ rotary.T) * scale
            out[tokens, head] = scores.masked_fill(masked, -torch.inf).softmax(-1) @ values
    return out
