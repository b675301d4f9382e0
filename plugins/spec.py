"""The contract of an operator: its operands, its result shapes, what it overwrites and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Dim = int | str  # symbolic: "T" tokens of the step, "R" rows that want logits
Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a value or a weight."""

    shape: Shape
    dtype: str = "float32"


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
Flops = Callable[[list[TensorSpec], Mapping[str, TensorSpec], Mapping[str, Any], Load], int]


@dataclass(frozen=True)
class OpSpec:
    """Declares one operator. Kernels are called `kernel(step, *inputs, **weights, **caches, **attributes)`.

    `infer(inputs, weights, attributes)` returns the specs of the outputs and raises `ValueError` on operands that
    do not fit; `flops(inputs, weights, attributes, load)` counts floating point operations. `aliases` maps an output
    index to the input index whose memory it may reuse. `step_inputs` names the arrays of the step contract that the
    kernel reads besides its operands.
    """

    name: str
    infer: Infer
    flops: Flops
    inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    optional_weights: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    step_inputs: tuple[str, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def elementwise_flops(per_element: int) -> Flops:
    """Cost of an operator that does `per_element` operations on each element of its first input."""

    def flops(
        inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
    ) -> int:
        return per_element * load.size(inputs[0].shape)

    return flops
