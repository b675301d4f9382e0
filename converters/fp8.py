"""FP8 checkpoints, read as what they stand for.

A matrix `X` of float8_e4m3fn has a scale beside it, `X_scale_inv` or `X_scale` (the two names mean the same), by which
it is multiplied: one number, or with `weight_block_size` [a, b] one for each block of a rows and b columns, the last
ones cut off. The product is taken in float32. Scales of activations are not needed. Other tensors are read as they are.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.quantization import Fp8Config

FLOAT8 = "F8_E4M3"
SCALES = ("_scale_inv", "_scale")
ACTIVATION_SCALES = (".activation_scale", ".input_scale")


class Fp8Reader(CheckpointReader):
    """A `CheckpointReader` without the scales, whose FP8 tensors come dequantised."""

    def __init__(self, folder: Path, config: Fp8Config) -> None:
        """Raises `ValueError` for an FP8 tensor without a scale or with one of another shape or dtype."""
        super().__init__(folder)
        self._block = config.block
        scales = {name + ending for name in self.names for ending in SCALES} & self.names
        matrices = [name for name in sorted(self.names - scales) if self.stored_dtype(name) == FLOAT8]
        self._scale_of = {name: self._find_scale(name) for name in matrices}
        unused = set(self._scale_of.values()) | {name for name in self.names if name.endswith(ACTIVATION_SCALES)}
        self.names -= unused

    def dtype(self, name: str) -> str:
        return "bfloat16" if name in self._scale_of else super().dtype(name)

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if name not in self._scale_of:
            return tensor
        scale = super().read(self._scale_of[name]).to(torch.float32)
        values = tensor.to(torch.float32)
        if self._block is None:
            return values.mul_(scale.reshape(()))
        rows, columns = self._block
        for i in range(scale.shape[-2]):
            by_column = scale[..., i : i + 1, :].repeat_interleave(columns, dim=-1)
            values[..., i * rows : (i + 1) * rows, :] *= by_column[..., : values.shape[-1]]
        return values

    def _find_scale(self, name: str) -> str:
        found = [name + ending for ending in SCALES if name + ending in self.names]
        if len(found) != 1:
            wanted = " or ".join(name + ending for ending in SCALES)
            raise ValueError(f"{self.path(name)}: {name} has dtype {FLOAT8} and {len(found)} scales, expected {wanted}")
        (scale,) = found
        super().dtype(scale)
        shape, stored = self.shape(name), self.shape(scale)
        if self._block is None:
            fits = math.prod(stored) == 1
            expected = "one number"
        else:
            grid = (*shape[:-2], *(-(-size // cut) for size, cut in zip(shape[-2:], self._block, strict=True)))
            fits = stored == grid
            expected = f"{list(grid)} for {list(shape)} in blocks of {list(self._block)}"
        if not fits:
            raise ValueError(f"{self.path(scale)}: {scale} has shape {list(stored)}, expected {expected}")
        return scale
