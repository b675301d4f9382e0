"""Sources of matrices that are padded with zeros, so that one product takes the place of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridtrt.converters.sources import Read, Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockDiagonal:
    """Matrices stored one by one, `[blocks, rows, columns]`, as one whose other entries are zero.

    The rows of each are cut into `sizes`: all first cuts, then all second cuts, …
    """

    name: str
    blocks: int
    sizes: tuple[int, ...]

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, (self.blocks, sum(self.sizes), shape[1] // self.blocks)

    def pieces(self, read: Read) -> Iterator[Tensor]:
        stored = read(self.name)
        columns = stored.shape[2]
        for cut in stored.split(list(self.sizes), dim=1):
            for block, rows in enumerate(cut):
                yield _pad_columns(rows, block * columns, (self.blocks - 1 - block) * columns)


@dataclass(frozen=True)
class PadColumns:
    """Zero columns before and after a matrix."""

    name: str
    before: int
    after: int

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, (shape[0], shape[1] - self.before - self.after)

    def pieces(self, read: Read) -> Iterator[Tensor]:
        yield _pad_columns(read(self.name), self.before, self.after)


def _pad_columns(rows: Tensor, before: int, after: int) -> Tensor:
    columns = rows.shape[1]
    padded = rows.new_zeros(len(rows), before + columns + after)
    padded[:, before : before + columns] = rows
    return padded
