"""Matrices of torch into panels (`panel_layout.py`) and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtrt.plugins.linear.panel_layout import PANEL, integer_bits, packed_bytes, padded_length, panel_bytes

SLICE = 1 << 22  # numbers packed at once
CLIPS = (1.0, 0.94, 0.88, 0.82, 1.07)  # of the largest number of a group, tried for 4 bits

Bytes = NDArray[np.uint8]


def pack(matrix: Tensor, form: str, group: int = 0) -> Bytes:
    """The bytes of a matrix `[..., N, K]` in a panel format, with a scale for every `group` numbers of a row.

    Integers are symmetric, each scale being rounded before the numbers are. Raises `ValueError` as `packed_bytes`.
    """
    *_, n, k = matrix.shape
    packed = np.empty(packed_bytes(matrix.shape, form, group), np.uint8)
    panel_size, count = panel_bytes(k, form, group), -(-n // PANEL)
    at_once = max(1, SLICE // (PANEL * max(k, 1)))
    end = 0
    for each in matrix.detach().reshape(-1, n, k):
        for first in range(0, count, at_once):
            rows = each[first * PANEL : (first + at_once) * PANEL]
            begin, end = end, end + -(-len(rows) // PANEL) * panel_size
            packed[begin:end] = _pack_rows(rows, form, group)
    return packed


def unpack(data: Bytes, form: str, shape: Sequence[int], group: int = 0) -> Tensor:
    """The matrix `shape` that the packed bytes stand for, exactly, as float32."""
    *lead, n, k = shape
    panels = torch.from_numpy(np.ascontiguousarray(data)).reshape(-1, panel_bytes(k, form, group))
    matrix = torch.empty(math.prod(lead), -(-n // PANEL), PANEL, k)
    flat = matrix.reshape(-1, PANEL, k)
    at_once = max(1, SLICE // (PANEL * max(k, 1)))
    for first in range(0, len(panels), at_once):
        flat[first : first + at_once] = _unpack_panels(panels[first : first + at_once], form, k, group)
    return matrix.flatten(1, 2)[:, :n].reshape(*lead, n, k).contiguous()


def integers(matrix: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
    """Whole numbers `[N, K]` int8 and their scales `[N, groups]` bfloat16, all above zero, of a matrix `[N, K]`.

    They are rounded as `pack` does it, but that there the scale of a group may be negative in 4 bits. A group of zeros
    has scale 1. `group` divides K; 0: one group a row.
    """
    n, k = matrix.shape
    group = group or k
    numbers = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, k // group, dtype=torch.bfloat16)
    at_once = max(1, SLICE // k)
    for first in range(0, n, at_once):
        rows = slice(first, first + at_once)
        groups = matrix[rows].detach().float().unflatten(1, (-1, group))[None]
        found, whole = _eight_bits(groups) if bits == 8 else _four_bits(groups, positive=True)
        numbers[rows] = whole[0].flatten(1).to(torch.int8)
        scales[rows] = torch.where(found == 0, 1, found)[0]
    return numbers, scales


def _pack_rows(rows: Tensor, form: str, group: int) -> Bytes:
    """Panels of rows `[n, K]`."""
    n, k = rows.shape
    padding = (0, padded_length(k, form, group) - k, 0, -n % PANEL)
    panels = torch.nn.functional.pad(rows, padding).unflatten(0, (-1, PANEL))  # [panels, 16, K]
    if form == "panel_float32":
        packed = panels.float().transpose(1, 2)
    elif form.startswith("panel_bfloat16"):
        packed = panels.bfloat16().unflatten(2, (-1, 2)).transpose(1, 2)
    else:
        return _pack_integers(panels.float(), form, group)
    return np.asarray(packed.contiguous().view(torch.uint8).reshape(-1).numpy())


def _pack_integers(panels: Tensor, form: str, group: int) -> Bytes:
    bits = integer_bits(form)
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


def _four_bits(groups: Tensor, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Scales and whole numbers from -8 to 7: the largest number becomes -8, or is clipped where that errs less.

    With `positive` scales it becomes 7 where it is not below zero.
    """
    low, high = groups.amin(3), groups.amax(3)
    extreme = torch.where(high > -low, high, low)
    step = extreme / -8 if not positive else torch.where(extreme > 0, extreme / 7, extreme / -8)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for clip in CLIPS:
        scales = (step * clip).bfloat16()
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
    if form.startswith("panel_bfloat16"):
        pairs: Tensor = panels.view(torch.bfloat16).unflatten(1, (-1, PANEL, 2))
        return pairs.transpose(1, 2).flatten(2)[..., :k].float()
    bits = integer_bits(form)
    groups = padded_length(k, form, group) // group if group else 1
    streams = panels.reshape(len(panels), groups, -1)
    scales = streams[..., : 2 * PANEL].contiguous().view(torch.bfloat16).float().transpose(1, 2)  # [panels, 16, groups]
    words = streams[..., 2 * PANEL :].contiguous().view(torch.int16).unflatten(2, (-1, PANEL, 2)).to(torch.int32)
    parts = torch.stack([words << (32 - bits * (i + 1)) >> (32 - bits) for i in range(16 // bits)], 4)
    numbers = parts.permute(0, 3, 1, 2, 4, 5).flatten(3)  # [panels, 16, groups, numbers of a group]
    return (numbers * scales.unsqueeze(3)).flatten(2)[..., :k]
