"""A tensor of a network with its shape and dtype, so that TensorRT need not be asked.

TensorRT infers shapes through the whole network whenever a layer was added and a shape is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridtrt.plugins.spec import TensorSpec

ROWS = -1  # a dimension that depends on the step


@dataclass(frozen=True)
class Tensor:
    """`handle` is a `trt.ITensor`."""

    handle: Any
    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @classmethod
    def of(cls, handle: Any, spec: TensorSpec) -> Tensor:
        """A tensor that has the shape of a spec, where symbols are sizes of the step."""
        return cls(handle, tuple(ROWS if isinstance(dim, str) else dim for dim in spec.shape), spec.dtype)
