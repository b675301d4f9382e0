"""Rotary position embedding in halves, in float32."""

from __future__ import annotations

import numpy as np

from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.tensor import Tensor


def rotary_table(node: Operands) -> tuple[Tensor, ...]:
    """cos and sin of position * inv_freq times `attention_factor`, `[T, rotary_dim / 2]` each."""
    layers, factor = node.layers, node.attributes["attention_factor"]
    positions = layers.cast(layers.reshape(node.inputs[0], (0, 1)), "float32")
    frequencies = layers.constant(np.array(node.attributes["inv_freq"], np.float32)[None])
    angles = layers.binary("PROD", positions, frequencies)
    return tuple(layers.multiply(layers.unary(function, angles), factor) for function in ("COS", "SIN"))


def rotary(node: Operands) -> tuple[Tensor, ...]:
    """Channel i of each head turns with channel i + rotary_dim / 2, the rest pass."""
    layers, (x, cos, sin) = node.layers, node.inputs
    half, head_dim = cos.shape[-1], x.shape[-1]
    dtype = node.results[0].dtype
    a, b = (layers.cast(layers.slice(x, node.rows, begin, half), "float32") for begin in (0, half))
    cos, sin = (layers.reshape(table, (0, 1, half)) for table in (cos, sin))

    def turned(x: Tensor, y: Tensor, sign: str) -> Tensor:
        """x cos -/+ y sin, in the dtype of the result."""
        both = layers.binary("PROD", x, cos), layers.binary("PROD", y, sin)
        return layers.cast(layers.binary(sign, *both), dtype)

    parts = [turned(a, b, "SUB"), turned(b, a, "SUM")]
    if 2 * half < head_dim:
        parts.append(layers.slice(x, node.rows, 2 * half, head_dim - 2 * half))
    return (layers.concat(*parts),)
