"""Matrices in panels, the layout that the C++ kernels stream through.

A matrix `[N, K]` is cut into panels of 16 rows, the last one filled up with zeros. A panel holds all that the kernel
reads for 16 outputs, in the order in which it reads it:

panel_float32: `[K][16]` float32
panel_bfloat16: `[K / 2][16][2]` bfloat16, K filled up to a multiple of 2

Matrices `[E, N, K]` of experts follow each other.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PANEL = 16

Bytes = NDArray[np.uint8]


def pack(matrix: Tensor, form: str, group: int = 0) -> Bytes:
    """The bytes of a matrix `[..., N, K]` in a panel format, with a scale for every `group` numbers of a row."""
    panels = _panels(matrix)  # [..., N / 16, 16, K]
    if form == "panel_float32":
        packed = panels.float().transpose(-1, -2)
    elif form == "panel_bfloat16":
        pairs = torch.nn.functional.pad(panels.bfloat16(), (0, panels.shape[-1] % 2))
        packed = pairs.unflatten(-1, (-1, 2)).transpose(-3, -2)
    else:
        raise ValueError(f"{form} is not a panel format")
    return np.asarray(packed.contiguous().view(torch.uint8).reshape(-1).numpy())


def unpack(data: Bytes, form: str, shape: tuple[int, ...], group: int = 0) -> Tensor:
    """The matrix `shape` that was packed, as float32, or bfloat16 where that is what is stored."""
    *lead, n, k = shape
    count = -(-n // PANEL)
    if form == "panel_float32":
        panels = torch.from_numpy(data.copy()).view(torch.float32).reshape(*lead, count, k, PANEL).transpose(-1, -2)
    elif form == "panel_bfloat16":
        pairs = torch.from_numpy(data.copy()).view(torch.bfloat16).reshape(*lead, count, -1, PANEL, 2)
        panels = pairs.transpose(-3, -2).flatten(-2)[..., :k]
    else:
        raise ValueError(f"{form} is not a panel format")
    return panels.flatten(-3, -2)[..., :n, :].contiguous()


def _panels(matrix: Tensor) -> Tensor:
    short = -matrix.shape[-2] % PANEL
    return torch.nn.functional.pad(matrix, (0, 0, 0, short)).unflatten(-2, (-1, PANEL))


def packed_bytes(shape: tuple[int, ...], form: str, group: int = 0) -> int:
    *lead, n, k = shape
    e = 1
    for d in lead:
        e *= d
    per = {"panel_float32": 4 * k, "panel_bfloat16": 4 * (-(-k // 2))}[form]
    return e * -(-n // 16) * 16 * per
