"""Matrices in panels, the layout that the C++ kernels stream through.

A matrix `[N, K]` is cut into panels of 16 rows, the last one filled up with zeros. A panel holds all that the kernel
reads for 16 outputs, in the order in which it reads it, and K is filled up with zeros to whole steps or groups:

panel_float32: `[K][16]` float32
panel_bfloat16: `[K / 2][16][2]` bfloat16
panel_int8, panel_int4: for each group of K `[16]` scales in bfloat16, then `[K / 2P][16][2]` words of 16 bits. A word
(q, n, i) holds the P = 2 or 4 numbers at k = 2Pq + i, 2Pq + 2 + i, ..., the first in its lowest bits, so that shifts
make of a vector of words vectors of pairs, each a factor of a multiply-and-add of pairs. A value is its number times
its scale. Group 0 is one group, the whole of K (int8 only).

Matrices `[E, N, K]` of experts follow each other. All numbers are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PANEL = 16
PANEL_ROLES = {("linear", "weight"), ("experts", "up"), ("experts", "down")}  # operators and weights in panels
GROUPS = {"panel_float32": (0,), "panel_bfloat16": (0,), "panel_int8": (0, 32, 64, 128), "panel_int4": (32, 64, 128)}
STEPS = {"panel_float32": 1, "panel_bfloat16": 2, "panel_int8": 4, "panel_int4": 8}  # numbers of K read at once
SLICE = 1 << 22  # numbers packed at once
CLIPS = (1.0, 0.94, 0.88, 0.82, 1.07)  # of the largest number of a group, tried for 4 bits

Bytes = NDArray[np.uint8]


def packed_bytes(shape: Sequence[int], form: str, group: int = 0) -> int:
    """Bytes of a matrix `[..., N, K]` in a panel format. Raises `ValueError` for a format or group there is not."""
    *lead, n, k = shape
    return math.prod(lead) * -(-n // PANEL) * _panel_bytes(k, form, group)


def pack(matrix: Tensor, form: str, group: int = 0) -> Bytes:
    """The bytes of a matrix `[..., N, K]` in a panel format, with a scale for every `group` numbers of a row.

    Integers are symmetric, each scale being rounded before the numbers are. Raises `ValueError` as `packed_bytes`.
    """
    *_, n, k = matrix.shape
    packed = np.empty(packed_bytes(matrix.shape, form, group), np.uint8)
    panel_bytes, count = _panel_bytes(k, form, group), -(-n // PANEL)
    at_once = max(1, SLICE // (PANEL * max(k, 1)))
    end = 0
    for each in matrix.detach().reshape(-1, n, k):
        for first in range(0, count, at_once):
            rows = each[first * PANEL : (first + at_once) * PANEL]
            begin, end = end, end + -(-len(rows) // PANEL) * panel_bytes
            packed[begin:end] = _pack_rows(rows, form, group)
    return packed


def unpack(data: Bytes, form: str, shape: Sequence[int], group: int = 0) -> Tensor:
    """The matrix `shape` that the packed bytes stand for, exactly, as float32."""
    *lead, n, k = shape
    panel_bytes = _panel_bytes(k, form, group)
    panels = torch.from_numpy(np.ascontiguousarray(data)).reshape(-1, panel_bytes)
    matrix = torch.empty(math.prod(lead), -(-n // PANEL), PANEL, k)
    flat = matrix.reshape(-1, PANEL, k)
    at_once = max(1, SLICE // (PANEL * max(k, 1)))
    for first in range(0, len(panels), at_once):
        flat[first : first + at_once] = _unpack_panels(panels[first : first + at_once], form, k, group)
    return matrix.flatten(1, 2)[:, :n].reshape(*lead, n, k).contiguous()


def _padded(k: int, form: str, group: int) -> int:
    step = group or STEPS[form]
    return -(-k // step) * step


def _panel_bytes(k: int, form: str, group: int) -> int:
    if form not in GROUPS:
        raise ValueError(f"{form} is not a panel format; there are {', '.join(GROUPS)}")
    if group not in GROUPS[form]:
        raise ValueError(f"group={group} is not one of {GROUPS[form]} that {form} can have")
    padded = _padded(k, form, group)
    if form in ("panel_float32", "panel_bfloat16"):
        return PANEL * padded * (4 if form == "panel_float32" else 2)
    numbers = PANEL * padded * _bits(form) // 8
    return numbers + 2 * PANEL * (padded // group if group else 1)


def _bits(form: str) -> int:
    return 16 // (STEPS[form] // 2)


def _pack_rows(rows: Tensor, form: str, group: int) -> Bytes:
    """Panels of rows `[n, K]`."""
    n, k = rows.shape
    padding = (0, _padded(k, form, group) - k, 0, -n % PANEL)
    panels = torch.nn.functional.pad(rows, padding).unflatten(0, (-1, PANEL))  # [panels, 16, K]
    if form == "panel_float32":
        packed = panels.float().transpose(1, 2)
    elif form == "panel_bfloat16":
        packed = panels.bfloat16().unflatten(2, (-1, 2)).transpose(1, 2)
    else:
        return _pack_integers(panels.float(), form, group)
    return np.asarray(packed.contiguous().view(torch.uint8).reshape(-1).numpy())


def _pack_integers(panels: Tensor, form: str, group: int) -> Bytes:
    bits = _bits(form)
    groups = panels.unflatten(2, (-1, group or panels.shape[2]))  # [panels, 16, groups, group]
    scales, numbers = _eight_bits(groups) if bits == 8 else _four_bits(groups)
    parts = numbers.to(torch.int32).bitwise_and_((1 << bits) - 1).unflatten(3, (-1, 16 // bits, 2))
    words = torch.zeros_like(parts[..., 0, :])  # [panels, 16, groups, steps, 2]
    for i in range(16 // bits):
        words |= parts[..., i, :] << (bits * i)
    scale_bytes = scales.transpose(1, 2).contiguous().view(torch.uint8)  # [panels, groups, 32]
    word_bytes = words.permute(0, 2, 3, 1, 4).flatten(2).numpy().astype("<u2").view(np.uint8)
    packed: Bytes = np.concatenate([scale_bytes.numpy(), word_bytes], 2).reshape(-1)
    return packed


def _eight_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales `[..., groups]` in bfloat16 and whole numbers from -127 to 127."""
    scales = (groups.abs().amax(3) / 127).bfloat16()
    return scales, _rounded(groups, scales, -127, 127)


def _four_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and whole numbers from -8 to 7: the largest number becomes -8, or is clipped where that errs less."""
    low, high = groups.amin(3), groups.amax(3)
    extreme = torch.where(high > -low, high, low)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for clip in CLIPS:
        scales = (extreme * (clip / -8)).bfloat16()
        numbers = _rounded(groups, scales, -8, 7)
        errors = torch.addcmul(groups, numbers, scales.float().unsqueeze(3), value=-1).square_().sum(3)
        if best is None:
            best = errors, scales, numbers
        else:
            better = errors < best[0]
            best = (
                torch.where(better, errors, best[0]),
                torch.where(better, scales, best[1]),
                torch.where(better.unsqueeze(3), numbers, best[2]),
            )
    assert best is not None
    return best[1:]


def _rounded(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    by = torch.where(scales == 0, 0, 1 / scales.float()).unsqueeze(3)
    return (groups * by).round_().clamp_(low, high)


def _unpack_panels(panels: Tensor, form: str, k: int, group: int) -> Tensor:
    """`[panels, 16, K]` float32."""
    if form == "panel_float32":
        columns: Tensor = panels.view(torch.float32).unflatten(1, (-1, PANEL))
        return columns.transpose(1, 2)
    if form == "panel_bfloat16":
        pairs: Tensor = panels.view(torch.bfloat16).unflatten(1, (-1, PANEL, 2))
        return pairs.transpose(1, 2).flatten(2)[..., :k].float()
    bits = _bits(form)
    groups = _padded(k, form, group) // group if group else 1
    streams = panels.reshape(len(panels), groups, -1)
    scales = streams[..., : 2 * PANEL].contiguous().view(torch.bfloat16).float().transpose(1, 2)  # [panels, 16, groups]
    words = streams[..., 2 * PANEL :].contiguous().view(torch.int16).unflatten(2, (-1, PANEL, 2)).to(torch.int32)
    parts = torch.stack([words << (32 - bits * (i + 1)) >> (32 - bits) for i in range(16 // bits)], 4)
    numbers = parts.permute(0, 3, 1, 2, 4, 5).flatten(3)  # [panels, 16, groups, numbers of a group]
    return (numbers * scales.unsqueeze(3)).flatten(2)[..., :k]
