"""Where a canonical weight comes from: a small expression over the tensors of a Hugging Face checkpoint.

An expression says which tensors it reads and which shapes they must have, so that a checkpoint is checked before
anything is read; then it yields the result in pieces, so that no more than one tensor is held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

Shape = tuple[int, ...]
Read = Callable[[str], torch.Tensor]


class Source(Protocol):
    """An expression over checkpoint tensors."""

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """The tensors it reads, with the shape each must have for the result to have `shape`."""

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        """The result in row-major order, cut into pieces."""


@dataclass(frozen=True)
class Named:
    """A tensor of the checkpoint as it is."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        yield read(self.name)


@dataclass(frozen=True)
class Concat:
    """Rows of the parts one after another; `rows` of each, equal numbers if not given."""

    parts: tuple[Source, ...]
    rows: tuple[int, ...] = ()

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        rows = self.rows or (shape[0] // len(self.parts),) * len(self.parts)
        for part, count in zip(self.parts, rows, strict=True):
            yield from part.tensors((count, *shape[1:]))

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        for part in self.parts:
            yield from part.pieces(read)


@dataclass(frozen=True)
class Stack:
    """The parts along a new first axis."""

    parts: tuple[Source, ...]

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        for part in self.parts:
            yield from part.tensors(shape[1:])

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        for part in self.parts:
            yield from part.pieces(read)


@dataclass(frozen=True)
class Deinterleave:
    """Rows that lie group after group, each group cut into `sizes`: all first cuts, then all second cuts, …"""

    name: str
    groups: int
    sizes: tuple[int, ...]

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        tensor = read(self.name)
        grouped = tensor.reshape(self.groups, sum(self.sizes), *tensor.shape[1:])
        yield from torch.split(grouped, list(self.sizes), dim=1)


@dataclass(frozen=True)
class AddOne:
    """1 + w in float32: the weight of a zero-centred norm."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        yield read(self.name).to(torch.float32) + 1.0


@dataclass(frozen=True)
class DropAxis:
    """Without the second axis, which has length one: the weight of a depthwise convolution."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, (shape[0], 1, *shape[1:])

    def pieces(self, read: Read) -> Iterator[torch.Tensor]:
        yield read(self.name)


@dataclass(frozen=True)
class FirstOf:
    """The spellings of one weight, the preferred one first."""

    alternatives: tuple[Source, ...]

    def choose(self, shape: Shape, names: Container[str]) -> Source:
        """The first alternative of which the checkpoint has a tensor; the first one if it has none of any."""
        for alternative in self.alternatives:
            if any(name in names for name, _ in alternative.tensors(shape)):
                return alternative
        return self.alternatives[0]


Sources = dict[str, Source | FirstOf]
