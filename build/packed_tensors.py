"""Weights as torch tensors: packed into an engine file, and read from one as the numbers that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridtrt.build.lowering import PackedWeight
from hybridtrt.build.packed_file import Bytes, stored_bytes, used_bytes
from hybridtrt.converters.safetensors_file import Layout
from hybridtrt.converters.safetensors_writer import Progress, write_safetensors
from hybridtrt.plugins.linear.packing import pack, unpack
from hybridtrt.plugins.linear.panel_layout import PANEL

SLICE_NUMBERS = 1 << 22  # packed at once


def write_packed(
    path: Path,
    weights: Mapping[str, PackedWeight],
    tensor: Callable[[str], Tensor],
    progress: Progress = lambda done, total: None,
) -> None:
    """Pack weights into a file, slice by slice; `tensor(name)` is a weight of the checkpoint."""
    layouts = {name: Layout((stored_bytes(weight),), "uint8") for name, weight in weights.items()}

    def pieces(name: str) -> Iterator[Tensor]:
        weight, written = weights[name], 0
        for rows in _slices([tensor(part) for part in weight.parts]):
            if weight.stored.format.startswith("panel_"):
                data = torch.from_numpy(pack(rows, weight.stored.format, weight.stored.group))
            else:
                data = rows.to(getattr(torch, weight.stored.format)).contiguous().view(torch.uint8).reshape(-1)
            written += len(data)
            yield data
        yield torch.zeros(stored_bytes(weight) - written, dtype=torch.uint8)

    write_safetensors(path, layouts, pieces, progress)


def _slices(parts: list[Tensor]) -> Iterator[Tensor]:
    """The rows of all parts in order, in slices of whole panels; of experts one after another."""
    if parts[0].dim() == 3:
        for part in parts:
            yield from part.unsqueeze(1) if part[0].numel() > SLICE_NUMBERS else (part,)
        return
    width = max(math.prod(parts[0].shape[1:]), 1)
    step = max(SLICE_NUMBERS // width // PANEL, 1) * PANEL
    held: list[Tensor] = []
    for part in parts:
        start = 0
        while start < len(part):
            room = step - sum(map(len, held))
            held.append(part[start : start + room])
            start += room
            if sum(map(len, held)) == step:
                yield torch.cat(held)
                held = []
    if held:
        yield torch.cat(held)


def read_part(data: Bytes, weight: PackedWeight, part: str) -> Tensor:
    """One of the weights that were packed together, by its name; `data` are the bytes of them all."""
    form, used = weight.stored.format, data[: used_bytes(weight)]
    if form.startswith("panel_"):
        whole = unpack(used, form, weight.shape, weight.stored.group)
    else:
        whole = torch.from_numpy(used.copy()).view(getattr(torch, form)).reshape(weight.shape)
    at = weight.parts.index(part)
    start = sum(weight.rows[:at])
    return whole[start : start + weight.rows[at]]
