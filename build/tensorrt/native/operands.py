"""What a function that emits layers for a node gets to see of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.tensor import Tensor
from hybridtrt.plugins.spec import TensorSpec


@dataclass(frozen=True)
class Operands:
    """A node's inputs as tensors, its weights by role, and the specs of its results.

    `step` has the arrays of the step contract.
    """

    layers: Layers
    inputs: tuple[Tensor, ...]
    roles: frozenset[str]
    weight: Callable[[str], Tensor]
    step: Mapping[str, Tensor]
    attributes: Mapping[str, Any]
    results: tuple[TensorSpec, ...]

    def wide(self, index: int = 0) -> Tensor:
        """An input in float32."""
        return self.layers.cast(self.inputs[index], "float32")

    def wide_weight(self, role: str, rank: int) -> Tensor:
        """A weight in float32 that broadcasts over tensors of a rank."""
        return self.layers.to_rank(self.layers.cast(self.weight(role), "float32"), rank)

    @property
    def rows(self) -> str:
        """The symbol for the rows of the results."""
        return self.results[0].rows
