"""The linear recurrence of linear attention and state space duality: chunked for prefill, stepped for decode.

S_t = exp(g_t) S_{t-1} + k_t u_t^T, o_t = q_t S_t, where u_t = v_t, or with the delta rule u_t = beta_t (v_t - k_t S),
S being the decayed state before t. The chunked form is that of arXiv 2312.06635 (gated) and arXiv 2412.06464 (gated
delta): inside a chunk everything is a matrix product, the delta rule one triangular solve. g may differ between the
channels of a key (arXiv 2510.26692): then the decay sits inside the products, see `_decayed_products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Chunks, Step
from hybridtrt.plugins.step import MOST_TOKEN_SLOTS

CHUNK = 64


def linear_recurrence(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    token_slots: Tensor | None = None,
) -> Tensor:
    """Run every row of a step from `state_src` to `state_dst`.

    k `[T, Hk, K]`; v `[T, H, V]` with H a multiple of Hk; q `[T, Hq, K]` with Hq = Hk, or a multiple of it where
    H = Hk; g (log decay, <= 0) `[T, H, K or 1]`; beta `[T, H]`; state `[slots, H, K, V]`, updated in place. Where
    `token_slots` `[T]` is given, short rows go token by token and leave states there, too. Returns
    `[T, max(Hq, H), V]`.
    """
    out = v.new_empty(v.shape[0], max(q.shape[1], v.shape[1]), v.shape[2])
    grouped = (k.shape[1], v.shape[1] // k.shape[1])  # key heads, value heads of each
    q, k = q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2)
    v = v.unflatten(1, grouped)
    g = None if g is None else g.unflatten(1, grouped)
    beta = None if beta is None else beta.unflatten(1, grouped)

    def read(rows: Tensor) -> Tensor:
        states: Tensor = state[step.state_src[rows]].to(v.dtype).unflatten(1, grouped)
        return states

    def write(slots: Tensor, states: Tensor) -> None:
        state[slots] = states.flatten(1, 2).to(state.dtype)

    def run(at: Tensor, states: Tensor) -> Tensor:
        """One token of each row, and the states after it."""
        decay, b = (None if gate is None else gate[at] for gate in (g, beta))
        o, after = _one_token(q[at], k[at], v[at], decay, b, states)
        out[at] = o.flatten(1, 2)
        return after

    if token_slots is not None:
        rows = torch.nonzero(step.lengths <= MOST_TOKEN_SLOTS).flatten()
        states = read(rows)
        for i in range(int(step.lengths[rows].max()) if len(rows) else 0):
            left = torch.nonzero(step.lengths[rows] > i).flatten()
            at = step.cu_seqlens[rows[left]] + i
            states[left] = run(at, states[left])
            asked = token_slots[at] != 0
            write(token_slots[at[asked]], states[left[asked]])
        write(step.state_dst[rows], states)
    elif len(step.single_rows):
        write(step.state_dst[step.single_rows], run(step.single_tokens, read(step.single_rows)))
    chunks = step.chunks(CHUNK, 1 if token_slots is None else MOST_TOKEN_SLOTS)
    if chunks is not None:
        o, final = _chunked(chunks, q, k, v, g, beta, read(chunks.rows))
        chunks.scatter(o.flatten(2, 3), out)
        write(step.state_dst[chunks.rows], final)
    return out


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of n rows: q, k `[n, Hk, 1, K]`, v `[n, Hk, r, V]`, g `[n, Hk, r, K or 1]`, beta `[n, Hk, r]`,
    state `[n, Hk, r, K, V]`.

    Where r is 1, q may have several heads of each k.
    """
    if g is not None:
        state = state * g.exp()[..., None]
    if beta is not None:
        v = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _chunked(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """All chunks of all longer rows. Returns `[N, C, Hk, r, V]` and the rows' final states."""
    q, k, v = (chunks.gather(x).movedim(1, -2) for x in (q, k, v))  # [N, Hk, 1 or r, C, K or V]
    # g summed from the chunk's start to each token; without g the decay is 1 everywhere. The sums may be large and
    # their differences small, so they are taken in float64.
    total = k.new_zeros(*k.shape[:-1], 1) if g is None else chunks.gather(g).movedim(1, -2)  # [N, Hk, r, C, K or 1]
    total = total.double().cumsum(-2)
    from_start = total.to(v.dtype).exp()
    to_end = (total[..., -1:, :] - total).to(v.dtype).exp()
    scores, *k_products = _decayed_products((q,) if beta is None else (q, k), k, total)
    q_state, k_state, k_out = q * from_start, None, k * to_end
    if beta is not None:
        b = chunks.gather(beta).movedim(1, -1)[..., None]
        # (I + strictly lower part of b k k^T decay) u = b v - (b k decayed) S, for both right-hand sides at once.
        sides = torch.cat([b * v, (b * k * from_start).expand(*v.shape[:-1], -1)], dim=-1)
        solved = torch.linalg.solve_triangular(b * k_products[0], sides, upper=False, unitriangular=True)
        v, k_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    out = v.new_empty(*v.shape[:2], max(q.shape[2], v.shape[2]), *v.shape[3:])
    for rows, numbers in chunks.waves:
        s, u = state[rows], v[numbers]
        if k_state is not None:
            u = u - k_state[numbers] @ s
        out[numbers] = q_state[numbers] @ s + scores[numbers] @ u
        state[rows] = s * from_start[numbers, ..., -1, :, None] + k_out[numbers].mT @ u
    return out.movedim(-2, 1), state


def _decayed_products(xs: Sequence[Tensor], k: Tensor, total: Tensor) -> Sequence[Tensor]:
    """For each x `[..., C, K]` the products x_i . (exp(total_i - total_j) k_j) for j <= i, else 0: `[..., C, C]`.

    With one decay a head, `total` `[..., C, 1]`, that is a product and a factor. With one a channel the exponents go
    into the operands, split at a token between j and i so that none is positive: the lower left quarter of the
    matrix is split at the end of its first half, and so on in either half, down to the diagonal. C is a power of 2.
    """
    size, dtype = total.shape[-2], k.dtype
    if total.shape[-1] == 1:
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        # Masked before exp so that no positive exponent is ever taken.
        decay = (total - total.mT).to(dtype).masked_fill(~causal, -torch.inf).exp()
        return [(x @ k.mT) * decay for x in xs]
    rows = torch.stack(torch.broadcast_tensors(*xs, total)[:-1])
    blocks = (rows * k).sum(-1)[..., None, None]  # [len(xs), ..., C / n, n, n] on the diagonal, for n = 1, 2, 4, ...
    half = 1
    while half < size:
        later = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        sooner = k.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        before, after = total.unflatten(-2, (-1, 2, half)).unbind(-3)
        border = before[..., -1:, :]
        corner = (later * (after - border).to(dtype).exp()) @ (sooner * (border - before).to(dtype).exp()).mT
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        top = torch.cat([first, torch.zeros_like(corner)], dim=-1)
        blocks = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
        half *= 2
    return blocks.squeeze(-3).unbind()
