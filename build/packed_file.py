"""The engine file: a safetensors file with the bytes of each packed weight, mapped and used where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtrt.build.lowering import PackedWeight
from hybridtrt.converters.checkpoint_reader import open_safetensors
from hybridtrt.converters.safetensors_writer import ALIGNMENT, Layout, Progress, write_safetensors
from hybridtrt.plugins.linear.packing import PANEL, pack, packed_bytes, unpack

SLICE_NUMBERS = 1 << 22  # packed at once

Bytes = NDArray[np.uint8]


def stored_bytes(weight: PackedWeight) -> int:
    """Bytes of a weight in the file, where each begins at a whole cache line."""
    form = weight.stored.format
    if form.startswith("panel_"):
        size = packed_bytes(weight.shape, form, weight.stored.group)
    else:
        size = math.prod(weight.shape) * getattr(torch, form).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


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


class PackedFile:
    """An engine file, mapped. Raises `ValueError` where it does not hold exactly the weights that are expected."""

    def __init__(self, path: Path, weights: Mapping[str, PackedWeight]) -> None:
        self._weights = dict(weights)
        self._data = {}
        stored = open_safetensors(path)
        for name in sorted(set(stored.keys()) ^ weights.keys()):
            raise ValueError(f"{path.name} has {'no' if name in weights else 'a surplus'} weight {name}")
        for name, weight in weights.items():
            entry = stored.get_slice(name)
            if (entry.get_dtype(), entry.get_shape()) != ("U8", [stored_bytes(weight)]):
                raise ValueError(
                    f"{path.name} has {name} as {entry.get_dtype()} {entry.get_shape()}, "
                    f"expected U8 [{stored_bytes(weight)}]"
                )
            self._data[name] = stored.get_tensor(name).numpy()

    @property
    def data(self) -> Mapping[str, Bytes]:
        """The bytes of each packed weight, as views of the mapped file."""
        return self._data

    def part(self, name: str, part: str) -> Tensor:
        """One of the weights that were packed together, as the numbers that its format stands for."""
        weight, form, group = self._weights[name], self._weights[name].stored.format, self._weights[name].stored.group
        if form.startswith("panel_"):
            size = packed_bytes(weight.shape, form, group)
            whole = unpack(self._data[name][:size], form, weight.shape, group)
        else:
            dtype = getattr(torch, form)
            size = math.prod(weight.shape) * dtype.itemsize
            whole = torch.from_numpy(self._data[name][:size].copy()).view(dtype).reshape(weight.shape)
        at = weight.parts.index(part)
        start = sum(weight.rows[:at])
        return whole[start : start + weight.rows[at]]
