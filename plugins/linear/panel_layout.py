"""Matrices in panels, the layout that the C++ kernels stream through.

A matrix `[N, K]` is cut into panels of 16 rows, the last one filled up with zeros. A panel holds all that the kernel
reads for 16 outputs, in the order in which it reads it, and K is filled up with zeros to whole steps or groups:

panel_float32: `[K][16]` float32
panel_bfloat16: `[K / 2][16][2]` bfloat16
panel_bfloat16_rounded: the same, multiplied by rows that are rounded to bfloat16, too
panel_int8, panel_int4: for each group of K `[16]` scales in bfloat16, then `[K / 2P][16][2]` words of 16 bits. A word
(q, n, i) holds the P = 2 or 4 numbers at k = 2Pq + i, 2Pq + 2 + i, ..., the first in its lowest bits, so that shifts
make of a vector of words vectors of pairs, each a factor of a multiply-and-add of pairs. A value is its number times
its scale. Group 0 is one group, the whole of K (int8 only).

Matrices `[E, N, K]` of experts follow each other. All numbers are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PANEL = 16
PANEL_ROLES = {("linear", "weight"), ("experts", "up"), ("experts", "down")}  # operators and weights in panels
GROUPS = {
    "panel_float32": (0,),
    "panel_bfloat16": (0,),
    "panel_bfloat16_rounded": (0,),
    "panel_int8": (0, 32, 64, 128),
    "panel_int4": (32, 64, 128),
}
STEPS = {
    "panel_float32": 1,
    "panel_bfloat16": 2,
    "panel_bfloat16_rounded": 2,
    "panel_int8": 4,
    "panel_int4": 8,
}  # of K, read at once
FLOAT_BYTES = {"panel_float32": 4, "panel_bfloat16": 2, "panel_bfloat16_rounded": 2}  # of a number


def packed_bytes(shape: Sequence[int], form: str, group: int = 0) -> int:
    """Bytes of a matrix `[..., N, K]` in a panel format. Raises `ValueError` for a format or group there is not."""
    *lead, n, k = shape
    return math.prod(lead) * -(-n // PANEL) * panel_bytes(k, form, group)


def padded_length(k: int, form: str, group: int) -> int:
    """K with the zeros that fill its last step or group."""
    step = group or STEPS[form]
    return -(-k // step) * step


def panel_bytes(k: int, form: str, group: int) -> int:
    """Bytes of one panel of rows `[K]`. Raises `ValueError` as `packed_bytes`."""
    if form not in GROUPS:
        raise ValueError(f"{form} is not a panel format; there are {', '.join(GROUPS)}")
    if group not in GROUPS[form]:
        raise ValueError(f"group={group} is not one of {GROUPS[form]} that {form} can have")
    padded = padded_length(k, form, group)
    if form in FLOAT_BYTES:
        return PANEL * padded * FLOAT_BYTES[form]
    numbers = PANEL * padded * integer_bits(form) // 8
    return numbers + 2 * PANEL * (padded // group if group else 1)


def integer_bits(form: str) -> int:
    """Bits of a number in a panel format of integers."""
    return 16 // (STEPS[form] // 2)
