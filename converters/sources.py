"""Where a canonical weight comes from: a small expression over the tensors of a Hugging Face checkpoint.

An expression says which tensors it reads and which shapes they must have, so that a checkpoint is checked before
anything is read; then it yields the result in pieces, so that no more than one tensor is held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the tables of sources are read where nothing is converted
    from torch import Tensor

Shape = tuple[int, ...]
Read: TypeAlias = "Callable[[str], Tensor]"
Piece: TypeAlias = "Tensor | NDArray[np.float32]"


class Source(Protocol):
    """An expression over checkpoint tensors."""

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """The tensors it reads, with the shape each must have for the result to have `shape`."""

    def pieces(self, read: Read) -> Iterator[Piece]:
        """The result in row-major order, cut into pieces."""


@dataclass(frozen=True)
class Named:
    """A tensor of the checkpoint as it is."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def pieces(self, read: Read) -> Iterator[Tensor]:
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

    def pieces(self, read: Read) -> Iterator[Piece]:
        for part in self.parts:
            yield from part.pieces(read)


@dataclass(frozen=True)
class Stack:
    """The parts along a new first axis."""

    parts: tuple[Source, ...]

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        for part in self.parts:
            yield from part.tensors(shape[1:])

    def pieces(self, read: Read) -> Iterator[Piece]:
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

    def pieces(self, read: Read) -> Iterator[Tensor]:
        tensor = read(self.name)
        grouped = tensor.reshape(self.groups, sum(self.sizes), *tensor.shape[1:])
        yield from grouped.split(list(self.sizes), dim=1)


@dataclass(frozen=True)
class SplitRotary:
    """Rows head after head, of which the last `rotary` of each turn in neighbouring pairs.

    The other rows of all heads, then the rotary rows of all heads, each head's in halves: first of each pair, then
    second of each pair.
    """

    name: str
    heads: int
    rotary: int

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def pieces(self, read: Read) -> Iterator[Tensor]:
        tensor = read(self.name)
        grouped = tensor.reshape(self.heads, -1, *tensor.shape[1:])
        plain = grouped.shape[1] - self.rotary
        yield grouped[:, :plain]
        yield grouped[:, plain:].unflatten(1, (-1, 2)).transpose(1, 2)


@dataclass(frozen=True)
class Transposed:
    """Matrices `[count, rows, columns]` that are stored as `[count, columns, rows]`."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, (shape[0], shape[2], shape[1])

    def pieces(self, read: Read) -> Iterator[Tensor]:
        for matrix in read(self.name):
            yield matrix.T


@dataclass(frozen=True)
class SplitPairs:
    """Rows of each matrix, or of each vector of a matrix, that alternate: the first of all pairs, then the second."""

    part: Named | Transposed

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield from self.part.tensors(shape)

    def pieces(self, read: Read) -> Iterator[Tensor]:
        for piece in self.part.pieces(read):
            for item in (piece,) if isinstance(self.part, Transposed) else piece:
                yield item.unflatten(0, (-1, 2)).transpose(0, 1)


@dataclass(frozen=True)
class AddOne:
    """1 + w in float32: the weight of a zero-centred norm."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def pieces(self, read: Read) -> Iterator[Tensor]:
        yield read(self.name).float() + 1.0


@dataclass(frozen=True)
class DropAxis:
    """Without the second axis, which has length one: the weight of a depthwise convolution."""

    name: str

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, (shape[0], 1, *shape[1:])

    def pieces(self, read: Read) -> Iterator[Tensor]:
        yield read(self.name)


@dataclass(frozen=True)
class Reshaped:
    """The same numbers in the same order, stored in another shape."""

    name: str
    stored: Shape

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, self.stored

    def pieces(self, read: Read) -> Iterator[Tensor]:
        yield read(self.name)


@dataclass(frozen=True)
class Constant:
    """Numbers that follow from the description of the model alone, in float32."""

    values: tuple[float, ...]

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield from ()

    def pieces(self, read: Read) -> Iterator[NDArray[np.float32]]:
        yield np.array(self.values, np.float32)


@dataclass(frozen=True)
class FirstOf:
    """The spellings of one weight, the preferred one first."""

    alternatives: tuple[Source, ...]

    def choose(self, shape: Shape, names: Container[str], shape_of: Callable[[str], Shape] | None = None) -> Source:
        """The first alternative that the checkpoint has whole, and in its shapes if `shape_of` tells those.

        If there is none, the one of which it has most tensors; the first one if it has none of any.
        """

        def fit(alternative: Source) -> tuple[bool, int]:
            tensors = list(alternative.tensors(shape))
            there = [(name, size) for name, size in tensors if name in names]
            right = shape_of is None or all(shape_of(name) == size for name, size in there)
            whole = len(there) == len(tensors) and right
            return whole, 0 if whole else len(there)

        return max(self.alternatives, key=fit)


Sources = dict[str, Source | FirstOf]


T = TypeVar("T", bound="Source | FirstOf")


def renamed(rule: T, prefixes: Iterable[tuple[str, str]]) -> T:
    """The same expression over tensors whose names begin otherwise: pairs of (old prefix, new prefix)."""
    changes: dict[str, Any] = {}
    for field in fields(rule):  # type: ignore[arg-type]
        value = getattr(rule, field.name)
        if field.name == "name":
            changes["name"] = next((new + value[len(old) :] for old, new in prefixes if value.startswith(old)), value)
        elif is_dataclass(value):
            changes[field.name] = renamed(value, prefixes)  # type: ignore[type-var]
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            changes[field.name] = tuple(renamed(item, prefixes) for item in value)
    return replace(rule, **changes)  # type: ignore[type-var]


def either(*spellings: Sources) -> Sources:
    """For each weight the first of its sources, by the same names in each, that the checkpoint has."""
    merged: Sources = {}
    for weight in spellings[0]:
        rules = (spelling[weight] for spelling in spellings)
        sources = [each for rule in rules for each in (rule.alternatives if isinstance(rule, FirstOf) else (rule,))]
        alternatives = tuple(dict.fromkeys(sources))
        merged[weight] = alternatives[0] if len(alternatives) == 1 else FirstOf(alternatives)
    return merged
