"""Functions in the Triton language that kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(cu_seqlens, B, number, SIZE: tl.constexpr):
    """Row, first token and one past the row's last token of a tile of SIZE tokens; first >= end: an empty tile.

    Row b has the tiles from cu_seqlens[b] // SIZE + b on, as many as it needs: rows cannot overlap, since a row of n
    tokens has at most (n + start) // SIZE - start // SIZE + 1 of them. So the row of a tile is found by bisection, and
    T // SIZE + B tiles are enough, whatever the lengths.
    """
    low = 0
    high = B - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens + middle) // SIZE + middle <= number:
            low = middle
        else:
            high = middle - 1
    start = tl.load(cu_seqlens + low)
    end = tl.load(cu_seqlens + low + 1)
    first = start + (number - (start // SIZE + low)) * SIZE
    return low, start, first, end


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr):
    """acc + a b with operands in DTYPE and sums in float32; float32 operands are split in three for tensor cores."""
    if tl.float32 == DTYPE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(a.to(DTYPE), b.to(DTYPE), acc)


@triton.jit
def dot_float32(a, b, DTYPE: tl.constexpr):
    """a b of float32 matrices whose numbers DTYPE may not hold: as exact as float32 where that is DTYPE, else with 10
    bits of mantissa."""
    return tl.dot(a, b, input_precision="tf32x3" if tl.float32 == DTYPE else "tf32")


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def tanh(x):
    """(1 - exp(-2 |x|)) / (1 + exp(-2 |x|)), with the sign of x."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow, and exact where exp(x) is small: what 1 + e rounds away is scaled out."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def decay_sums(g):
    """Sums of log decays g `[tokens, ...]` (<= 0) from the first to each token, and over all, as pairs of float32
    numbers high and low: the exponent between two tokens is the difference of the highs plus that of the lows.

    The sums may be large and their differences small. High sums are multiples of 2^-9 and exact, low ones at most
    tokens 2^-9. For that g is bounded by -200, of which exp is 0 as well; up to 128 tokens.
    """
    g = tl.maximum(g, -200.0)
    coarse = tl.ceil(g * 512.0) * (1.0 / 512.0)
    fine = g - coarse
    return tl.cumsum(coarse, 0), tl.cumsum(fine, 0), tl.sum(coarse, 0), tl.sum(fine, 0)
