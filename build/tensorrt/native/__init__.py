"""Operators that TensorRT's own layers compute, one function each; the others are plugins.

What is computed between a node's operands and its result is float32: TensorRT fuses casts into what they stand beside,
and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtrt.build.tensorrt.native.linear import embedding, gather_rows, linear
from hybridtrt.build.tensorrt.native.norms import layer_norm, rms_norm
from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.native.pointwise import (
    activation,
    add,
    affine,
    gated_activation,
    mean_heads,
    multiply,
    scale,
)
from hybridtrt.build.tensorrt.native.reshaping import concat, flatten, split
from hybridtrt.build.tensorrt.native.rotary import rotary, rotary_table
from hybridtrt.build.tensorrt.tensor import Tensor

NATIVE: dict[str, Callable[[Operands], tuple[Tensor, ...]]] = {
    function.__name__: function
    for function in (
        activation,
        add,
        affine,
        concat,
        embedding,
        flatten,
        gated_activation,
        gather_rows,
        layer_norm,
        linear,
        mean_heads,
        multiply,
        rms_norm,
        rotary,
        rotary_table,
        scale,
        split,
    )
}
