"""The engine file: a safetensors file with the bytes of each packed weight, mapped and used where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridtrt.build.lowering import PackedWeight
from hybridtrt.converters.safetensors_file import ALIGNMENT, map_bytes, open_safetensors
from hybridtrt.plugins.caches import DTYPE_BYTES
from hybridtrt.plugins.linear.panel_layout import packed_bytes

Bytes = NDArray[np.uint8]


def stored_bytes(weight: PackedWeight) -> int:
    """Bytes of a weight in the file, where each begins at a whole cache line."""
    return -(-used_bytes(weight) // ALIGNMENT) * ALIGNMENT


def used_bytes(weight: PackedWeight) -> int:
    """Bytes of a weight without what fills the last cache line."""
    form = weight.stored.format
    if form.startswith("panel_"):
        return packed_bytes(weight.shape, form, weight.stored.group)
    return math.prod(weight.shape) * DTYPE_BYTES[form]


class PackedFile:
    """An engine file, mapped. Raises `ValueError` where it does not hold exactly the weights that are expected."""

    def __init__(self, path: Path, weights: Mapping[str, PackedWeight]) -> None:
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
        self._data = map_bytes(path)

    @property
    def data(self) -> Mapping[str, Bytes]:
        """The bytes of each packed weight, as views of the mapped file."""
        return self._data
