"""Moves between layouts of a token's numbers."""

from __future__ import annotations

import math

from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.tensor import Tensor


def split(node: Operands) -> tuple[Tensor, ...]:
    """Cut `[T, n]` along n into `[T, *shape]` for each of `shapes`."""
    layers, (x,) = node.layers, node.inputs
    parts, begin = [], 0
    for shape in node.attributes["shapes"]:
        size = math.prod(shape)
        part = layers.slice(x, node.rows, begin, size)
        parts.append(part if len(shape) == 1 else layers.reshape(part, (0, *shape)))
        begin += size
    return tuple(parts)


def concat(node: Operands) -> tuple[Tensor, ...]:
    """x and y along the last axis."""
    x, y = node.inputs
    return (node.layers.concat(x, node.layers.cast(y, x.dtype)),)


def flatten(node: Operands) -> tuple[Tensor, ...]:
    """`[T, ...]` to `[T, n]`."""
    (x,) = node.inputs
    return (node.layers.reshape(x, (0, math.prod(x.shape[1:]))),)
