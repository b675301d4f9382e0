"""The contract of an operator: its operands, its result shapes, what it overwrites and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Dim = int | str  # symbolic: "T" tokens of the step, "R" rows that want logits
Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a value or a weight."""

    shape: Shape
    dtype: str = "float32"

    @property
    def rows(self) -> str:
        """What a value has a row for: "T", "R", or "1" where it is one row in a step of any size."""
        return self.shape[0] if isinstance(self.shape[0], str) else "1"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The dimensions of one row."""
        return tuple(int(dim) for dim in (self.shape if self.rows == "1" else self.shape[1:]))


@dataclass(frozen=True)
class Load:
    """The size of a step, for cost formulas."""

    tokens: int
    sequences: int
    logits_rows: int
    attended: int = 0  # keys attended, summed over the step's tokens

    def size(self, shape: Shape) -> int:
        """Number of elements of a shape with symbolic dimensions."""
        names = {"T": self.tokens, "B": self.sequences, "R": self.logits_rows}
        total = 1
        for dim in shape:
            total *= names[dim] if isinstance(dim, str) else dim
        return total


Infer = Callable[[list[TensorSpec], Mapping[str, TensorSpec], Mapping[str, Any]], list[TensorSpec]]
Count = Callable[[list[TensorSpec], Mapping[str, TensorSpec], Mapping[str, Any], Load], int]


@dataclass(frozen=True)
class OpSpec:
    """Declares one operator. Kernels are called `kernel(step, *inputs, **weights, **caches, **attributes)`.

    `infer(inputs, weights, attributes)` returns the specs of the outputs and raises `ValueError` on operands that
    do not fit; `flops(inputs, weights, attributes, load)` counts floating point operations, and `rows_read`, with the
    same arguments, the rows of each weight that are read, where that is not all of them. `aliases` maps an output
    index to the input index whose memory it may reuse. `step_inputs` names the arrays of the step contract that the
    kernel reads besides its operands, `optional_step_inputs` those that it reads where the step has them. `choices`
    lists the names that an attribute may have, where it is a name.
    """

    name: str
    infer: Infer
    flops: Count
    inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    optional_weights: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    step_inputs: tuple[str, ...] = ()
    optional_step_inputs: tuple[str, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    rows_read: Count | None = None
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def per_element(count: int) -> Count:
    """`count` for each element of the first input."""

    def total(
        inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
    ) -> int:
        return count * load.size(inputs[0].shape)

    return total
