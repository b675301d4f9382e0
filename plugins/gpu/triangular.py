"""The inverse of a unit lower triangular matrix, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import dot_float32

LEAF = tl.constexpr(16)


@triton.jit
def unit_lower_inverse(a, N: tl.constexpr, DTYPE: tl.constexpr):
    """(I + a)^-1 of the strictly lower triangular a [N, N] in float32, for a use in DTYPE; N is 16, 32, 64, ...

    The blocks of 16 x 16 on the diagonal by forward substitution, all at once. Then two neighbours become one: below
    the diagonal, the inverse of (p 0; c q) is -q^-1 c p^-1. With the inverses found so far in a block diagonal x and
    all c of the level in a matrix of zeros otherwise, that is x - x c x.
    """
    BLOCKS: tl.constexpr = N // LEAF
    n = tl.arange(0, BLOCKS)
    diagonal = (n[:, None, None, None] == n[None, None, :, None]) & (tl.arange(0, LEAF) >= 0)[None, :, None, None]
    leaves = tl.sum(tl.where(diagonal, tl.reshape(a, (BLOCKS, LEAF, BLOCKS, LEAF)), 0.0), axis=2)
    i = tl.arange(0, LEAF)
    x = tl.where((i[:, None] == i[None, :])[None, :, :], leaves * 0.0 + 1.0, 0.0)
    for step in range(1, LEAF):
        this = (i == step)[None, :, None]
        factors = tl.sum(tl.where(this, leaves, 0.0), axis=1)  # row `step` of each block
        x = tl.where(this, x - tl.sum(factors[:, :, None] * x, axis=1)[:, None, :], x)
    x = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), (N, N))
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, N)[None, :]
    for level in tl.static_range(8):
        if LEAF << level < N:
            part = row // (LEAF << level)
            below = (part % 2 == 1) & (column // (LEAF << level) == part - 1)
            c = tl.where(below, a, 0.0)
            x -= dot_float32(dot_float32(x, c, DTYPE), x, DTYPE)
    return x
