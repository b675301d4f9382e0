"""The recurrence, token after token.

gated: the state decays by exp(g) a token, each head or each of its key channels (Kimi Delta Attention, arXiv
2510.26692) by its own. g = -exp(A_log) softplus(a + dt_bias) (Mamba's gate, as in Gated DeltaNet, arXiv 2412.06464), or
with a lower bound decay_bound sigmoid(exp(A_log) (a + dt_bias)), or -exp(A_log) for every token (Lightning Attention,
arXiv 2401.04658);
delta: beta = beta_scale sigmoid(b), and the state is corrected by what it already predicts for k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def prepare(
    q: Tensor,
    k: Tensor,
    gates: tuple[Tensor, ...],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    rule: str,
    scale: float,
    l2_norm: bool,
    decay_bound: float | None,
    beta_scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Normalised and scaled q, normalised k, log decay g `[T, heads, K or 1]`, beta (None where the rule has none)."""
    if l2_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    remaining = list(gates)
    g = beta = None
    if A_log is not None:
        rate = A_log.exp()[:, None]
        if dt_bias is None:
            g = -rate.expand(len(q), -1, -1)
        else:
            a = (remaining.pop(0) + dt_bias).reshape(len(q), len(rate), -1)
            g = -rate * F.softplus(a) if decay_bound is None else decay_bound * (rate * a).sigmoid()
    if "delta" in rule:
        beta = beta_scale * remaining.pop(0).sigmoid()
    return q * scale, k, g, beta


def linear_attention(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state: Tensor,
    rule: str,
    scale: float,
    l2_norm: bool = False,
    decay_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """`[T, heads, V]` from q, k `[T, key_heads, K]` and v `[T, heads, V]`. States go to `token_slots`, too."""
    q, k, g, beta = prepare(q, k, gates, A_log, dt_bias, rule, scale, l2_norm, decay_bound, beta_scale)
    repeats = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    out = torch.empty_like(v)
    slots = None if step.token_slots is None else step.token_slots.tolist()
    for row, tokens in step.slices():
        s = state[step.state_src[row]].to(v.dtype)  # [heads, K, V]
        for t in range(tokens.start, tokens.stop):
            if g is not None:
                s = s * g[t].exp()[:, :, None]
            u = v[t] if beta is None else beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], s))
            s = s + k[t][:, :, None] * u[:, None, :]
            out[t] = torch.einsum("hk,hkv->hv", q[t], s)
            if slots is not None and slots[t] != 0:
                state[slots[t]] = s.to(state.dtype)
        state[step.state_dst[row]] = s.to(state.dtype)
    return out
