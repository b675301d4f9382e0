"""Layers of a network, one call each: tensors in, a tensor out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridtrt.build.tensorrt.tensor import ROWS, Tensor
from hybridtrt.build.tensorrt.trt_dtypes import trt_dtype


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
        self._sizes: dict[str, Any] = {}

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

    def add(self, kind: str, layer: Any, shape: tuple[int, ...], dtype: str) -> Tensor:
        """The only output of a layer that was just made. Raises `ValueError` where TensorRT refused it."""
        if layer is None:
            raise ValueError(f"TensorRT refuses a layer of kind {kind!r}")
        self._added.append((kind, layer))
        return Tensor(layer.get_output(0), shape, dtype)

    def constant(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
        """float32."""
        array = np.ascontiguousarray(array)
        self.keep(array)
        layer = self.network.add_constant(array.shape, self.trt.Weights(array.reshape(-1)))
        return self.add("constant", layer, array.shape, "float32")

    def scalar(self, value: float, like: Tensor) -> Tensor:
        """A float32 number that broadcasts over `like`."""
        return self.constant(np.full((1,) * like.rank, value, np.float32))

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        if x.dtype == dtype:
            return x
        return self.add("cast", self.network.add_cast(x.handle, trt_dtype(self.trt, dtype)), x.shape, dtype)

    def binary(self, operation: str, x: Tensor, y: Tensor) -> Tensor:
        """`SUM`, `SUB`, `PROD`, `DIV` of tensors of one rank and dtype, broadcast."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        shape = tuple(b if a == 1 else a for a, b in zip(x.shape, y.shape, strict=True))
        layer = self.network.add_elementwise(x.handle, y.handle, kind)
        return self.add(operation.lower(), layer, shape, x.dtype)

    def unary(self, operation: str, x: Tensor) -> Tensor:
        kind = getattr(self.trt.UnaryOperation, operation)
        return self.add(operation.lower(), self.network.add_unary(x.handle, kind), x.shape, x.dtype)

    def activation(self, function: str, x: Tensor) -> Tensor:
        kind = getattr(self.trt.ActivationType, function)
        return self.add(function.lower(), self.network.add_activation(x.handle, kind), x.shape, x.dtype)

    def mean(self, x: Tensor, axis: int) -> Tensor:
        """Over one axis, which stays as 1."""
        layer = self.network.add_reduce(x.handle, self.trt.ReduceOperation.AVG, 1 << axis, True)
        return self.add("mean", layer, (*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)

    def multiply(self, x: Tensor, by: float) -> Tensor:
        """x in float32, times a constant."""
        return x if by == 1.0 else self.binary("PROD", x, self.scalar(by, x))

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T for x `[rows, in]` and a weight `[out, in]`."""
        plain, transpose = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        layer = self.network.add_matrix_multiply(x.handle, plain, weight.handle, transpose)
        return self.add("matmul", layer, (x.shape[0], weight.shape[0]), x.dtype)

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        """Rows of x."""
        layer = self.network.add_gather(x.handle, indices.handle, 0)
        return self.add("gather", layer, (*indices.shape, *x.shape[1:]), x.dtype)

    def concat(self, *parts: Tensor) -> Tensor:
        """Along the last axis."""
        if len(parts) == 1:
            return parts[0]
        layer = self.network.add_concatenation([part.handle for part in parts])
        layer.axis = parts[0].rank - 1
        width = sum(part.shape[-1] for part in parts)
        return self.add("concat", layer, (*parts[0].shape[:-1], width), parts[0].dtype)

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """A 0 takes the dimension at that place of x."""
        layer = self.network.add_shuffle(x.handle)
        layer.reshape_dims = tuple(dims)
        return self.add("reshape", layer, tuple(dim or x.shape[i] for i, dim in enumerate(dims)), x.dtype)

    def to_rank(self, weight: Tensor, rank: int) -> Tensor:
        """A weight with ones before its dimensions, so that it broadcasts over tokens."""
        return weight if weight.rank == rank else self.reshape(weight, (1,) * (rank - weight.rank) + weight.shape)

    def slice(self, x: Tensor, rows: str, begin: int, size: int) -> Tensor:
        """`size` numbers from `begin` on of the last axis of x `[rows, ...]`, where rows is "T" or "R"."""
        if begin == 0 and size == x.shape[-1]:
            return x
        ones, start = (1,) * x.rank, (0,) * (x.rank - 1) + (begin,)
        layer = self.network.add_slice(x.handle, start, ones, ones)
        layer.set_input(2, self._size(rows, (*x.shape[1:-1], size)))
        return self.add("slice", layer, (ROWS, *x.shape[1:-1], size), x.dtype)

    def rows_of(self, symbol: str, tensor: Tensor) -> None:
        """`tensor` `[rows]` says how many rows the symbol "T" or "R" stands for."""
        layer = self.network.add_shape(tensor.handle)
        layer.name = f"sizes.{symbol}"
        self._sizes[layer.name] = layer.get_output(0)

    def _size(self, rows: str, rest: tuple[int, ...]) -> Any:
        """The shape `[rows, *rest]` as a `trt.ITensor`."""
        name = ".".join(["sizes", rows, *map(str, rest)])
        if name not in self._sizes:
            others = np.array(rest, np.int64)
            self.keep(others)
            constant = self.network.add_constant(others.shape, self.trt.Weights(others))
            constant.name = f"{name}/constant"
            layer = self.network.add_concatenation([self._sizes[f"sizes.{rows}"], constant.get_output(0)])
            layer.axis = 0
            layer.name = name
            self._sizes[name] = layer.get_output(0)
        return self._sizes[name]
