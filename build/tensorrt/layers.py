"""Layers of a network, one call each: tensors in, a tensor out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridtrt.build.tensorrt.trt_dtypes import dtype_name, trt_dtype

Tensor = Any  # trt.ITensor


class Layers:
    """Adds layers to a network under the name of the node that they are for.

    A node's only layer has the node's name, several have `{node}/{what}`. Arrays that constants read are kept alive
    here: TensorRT does not copy them before it builds.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt = trt
        self.network = network
        self._kept: list[Any] = []
        self._added: list[tuple[str, Any]] = []
        self._rows: dict[str, Tensor] = {}

    def keep(self, array: Any) -> None:
        """Hold memory that a constant points to until the network is built."""
        self._kept.append(array)

    def end_node(self, name: str) -> None:
        """Name the layers that were added since the last node ended."""
        used: dict[str, int] = {}
        for kind, layer in self._added:
            count = used[kind] = used.get(kind, 0) + 1
            suffix = kind if count == 1 else f"{kind}.{count}"
            layer.name = name if len(self._added) == 1 else f"{name}/{suffix}"
        self._added.clear()

    def add(self, kind: str, layer: Any) -> Tensor:
        """The only output of a layer that was just made. Raises `ValueError` where TensorRT refused it."""
        if layer is None:
            raise ValueError(f"TensorRT refuses a layer of kind {kind!r}")
        self._added.append((kind, layer))
        return layer.get_output(0)

    def constant(self, array: np.ndarray[Any, Any]) -> Tensor:
        """float32, int32 or int64."""
        array = np.ascontiguousarray(array)
        self.keep(array)
        return self.add("constant", self.network.add_constant(array.shape, self.trt.Weights(array.reshape(-1))))

    def scalar(self, value: float, like: Tensor) -> Tensor:
        """A float32 number that broadcasts over `like`."""
        return self.constant(np.full((1,) * len(like.shape), value, np.float32))

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        if dtype_name(self.trt, x.dtype) == dtype:
            return x
        return self.add("cast", self.network.add_cast(x, trt_dtype(self.trt, dtype)))

    def cast_like(self, x: Tensor, other: Tensor) -> Tensor:
        """x in the dtype of another tensor."""
        return self.cast(x, dtype_name(self.trt, other.dtype))

    def binary(self, operation: str, x: Tensor, y: Tensor) -> Tensor:
        """`SUM`, `SUB`, `PROD`, `DIV` of tensors of one rank, broadcast."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.add(operation.lower(), self.network.add_elementwise(x, y, kind))

    def unary(self, operation: str, x: Tensor) -> Tensor:
        kind = getattr(self.trt.UnaryOperation, operation)
        return self.add(operation.lower(), self.network.add_unary(x, kind))

    def activation(self, function: str, x: Tensor) -> Tensor:
        kind = getattr(self.trt.ActivationType, function)
        return self.add(function.lower(), self.network.add_activation(x, kind))

    def mean(self, x: Tensor, axis: int) -> Tensor:
        """Over one axis, which stays as 1."""
        average = self.trt.ReduceOperation.AVG
        return self.add("mean", self.network.add_reduce(x, average, 1 << axis, True))

    def multiply(self, x: Tensor, by: float) -> Tensor:
        """x in float32, times a constant."""
        return x if by == 1.0 else self.binary("PROD", x, self.scalar(by, x))

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T for x `[T, in]` and a weight `[out, in]`."""
        plain, transpose = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        return self.add("matmul", self.network.add_matrix_multiply(x, plain, weight, transpose))

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        """Rows of x."""
        return self.add("gather", self.network.add_gather(x, indices, 0))

    def concat(self, *parts: Tensor) -> Tensor:
        """Along the last axis."""
        if len(parts) == 1:
            return parts[0]
        layer = self.network.add_concatenation(list(parts))
        layer.axis = len(parts[0].shape) - 1
        return self.add("concat", layer)

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """A 0 takes the dimension at that place of x."""
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(dims)
        return self.add("reshape", layer)

    def to_rank(self, weight: Tensor, rank: int) -> Tensor:
        """A weight with ones before its dimensions, so that it broadcasts over tokens."""
        shape = tuple(weight.shape)
        return weight if len(shape) == rank else self.reshape(weight, (1,) * (rank - len(shape)) + shape)

    def slice(self, x: Tensor, rows: str, begin: int, size: int) -> Tensor:
        """`size` numbers from `begin` on of the last axis of x `[rows, ...]`, where rows is "T" or "R"."""
        shape = tuple(x.shape)
        if begin == 0 and size == shape[-1]:
            return x
        rank = len(shape)
        layer = self.network.add_slice(x, (0,) * (rank - 1) + (begin,), (1,) * rank, (1,) * rank)
        layer.set_input(2, self._sizes(rows, (*shape[1:-1], size)))
        return self.add("slice", layer)

    def rows_of(self, symbol: str, tensor: Tensor) -> None:
        """`tensor` `[rows]` says how many rows the symbol "T" or "R" stands for."""
        layer = self.network.add_shape(tensor)
        layer.name = f"sizes.{symbol}"
        self._rows[symbol] = layer.get_output(0)

    def _sizes(self, rows: str, rest: tuple[int, ...]) -> Tensor:
        """The shape `[rows, *rest]` as a tensor."""
        name = ".".join(["sizes", rows, *map(str, rest)])
        if name not in self._rows:
            others = np.array(rest, np.int64)
            self.keep(others)
            constant = self.network.add_constant(others.shape, self.trt.Weights(others))
            constant.name = f"{name}.rest"
            layer = self.network.add_concatenation([self._rows[rows], constant.get_output(0)])
            layer.axis = 0
            layer.name = name
            self._rows[name] = layer.get_output(0)
        return self._rows[name]
