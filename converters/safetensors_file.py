"""Safetensors files without torch: what a tensor in one is, opening one, its bytes where they lie.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header padded with spaces,
the data without holes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hybridtrt.plugins.caches import DTYPE_BYTES

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
ALIGNMENT = 64  # of the first byte of data


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def open_safetensors(path: Path, framework: str = "numpy") -> Any:
    """Open a file for names, shapes and dtypes; with framework "pt" its tensors are views of the mapped file.

    Raises `ValueError` if it is missing, truncated or damaged.
    """
    try:
        return safe_open(str(path), framework=framework)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: truncated or damaged safetensors file ({error})") from None


def map_bytes(path: Path) -> dict[str, NDArray[np.uint8]]:
    """The bytes of each tensor, mapped, of a file that `open_safetensors` has found sound; the file is not written."""
    data = np.memmap(path, np.uint8, "c").view(np.ndarray)
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    header.pop("__metadata__", None)
    return {name: data[begin:][slice(*entry["data_offsets"])] for name, entry in header.items()}
