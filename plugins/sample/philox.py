"""Random numbers from counters: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The generator of cuRAND, PyTorch's CUDA backend and Triton's `tl.rand`: a number is a pure function of (seed, position),
so it does not depend on the batch, and a GPU kernel can compute the same one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Four random 32-bit words (in uint64) from four counter words and two key words, elementwise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: U64, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one for each pair of seed and position, `[R]`."""
    index = positions.astype(np.uint64)
    zero = np.zeros_like(index)
    a, b, _, _ = philox((index & _LOW, index >> _SHIFT, zero, zero), (seeds & _LOW, seeds >> _SHIFT))
    bits = ((a >> np.uint64(5)) << np.uint64(26)) | (b >> np.uint64(6))
    return np.asarray(bits * 2.0**-53)
