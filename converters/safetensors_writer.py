"""Writes a safetensors file tensor by tensor: the header first, from shapes alone, then the data as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from hybridtrt.converters.safetensors_file import ALIGNMENT, DTYPES, Layout
from hybridtrt.converters.sources import Piece
from hybridtrt.plugins.caches import DTYPE_BYTES

SLICE_ELEMENTS = 1 << 22  # cast and written at once

Progress = Callable[[int, int], None]  # bytes written, bytes in all


def write_safetensors(
    path: Path,
    layouts: Mapping[str, Layout],
    pieces: Callable[[str], Iterable[Piece]],
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the tensors of `layouts`; `pieces(name)` yields the values of one in row-major order.

    Wide dtypes come first, so that every tensor is aligned to its elements. Raises `ValueError` if the pieces of a
    tensor do not fill it exactly or do not fit its dtype.
    """
    order = sorted(layouts, key=lambda name: -DTYPE_BYTES[layouts[name].dtype])
    total = sum(layout.num_bytes for layout in layouts.values())
    done = 0
    with path.open("wb") as file:
        file.write(_header(order, layouts))
        for name in order:
            layout = layouts[name]
            written = 0
            for piece in pieces(name):
                for part in torch.split(torch.as_tensor(piece).reshape(-1), SLICE_ELEMENTS):
                    data = _cast(name, part, layout.dtype)
                    file.write(data.view(torch.uint8).numpy().data)
                    written += data.nbytes
                    progress(done + written, total)
            if written != layout.num_bytes:
                raise ValueError(f"{name}: {written} bytes for {layout}, expected {layout.num_bytes}")
            done += written


def _cast(name: str, values: torch.Tensor, dtype: str) -> torch.Tensor:
    data = values.to(getattr(torch, dtype)).contiguous()
    if dtype == "float16" and values.dtype != torch.float16 and bool((data.isinf() & values.isfinite()).any()):
        raise ValueError(f"{name}: a value of magnitude {values.abs().max():g} does not fit float16")
    return data


def _header(order: list[str], layouts: Mapping[str, Layout]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        layout = layouts[name]
        end = offset + layout.num_bytes
        header[name] = {"dtype": DTYPES[layout.dtype], "shape": list(layout.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
