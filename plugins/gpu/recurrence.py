"""One chunk of the linear recurrence S_t = S_{t-1} + k_t x_t^T, y_t = q_t S_t, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import dot, dot_float32


@triton.jit
def read_chunk(q, k, x, s, BT: tl.constexpr, DOT: tl.constexpr):
    """y [BT, V] of a chunk's q, k [BT, K] and x [BT, V], S [K, V] being the state before. Sums grow without bound, so
    S is not rounded to 16 bits."""
    i = tl.arange(0, BT)
    scores = dot(q, tl.trans(k), tl.zeros((BT, BT), tl.float32), DOT)
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    return dot(scores, x, dot_float32(q.to(tl.float32), s, DOT), DOT)


@triton.jit
def write_chunk(k, x, s, DOT: tl.constexpr):
    """The state after the chunk."""
    return dot(tl.trans(k), x, s, DOT)
