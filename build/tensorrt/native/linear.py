"""Products with matrices, and rows of tables."""

from __future__ import annotations

from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.tensor import Tensor


def linear(node: Operands) -> tuple[Tensor, ...]:
    """x W^T + b in the dtype of W."""
    layers = node.layers
    weight = node.weight("weight")
    x = node.inputs[0]
    y = layers.matmul(layers.cast(x, weight.dtype), weight)
    if "bias" in node.roles:
        y = layers.binary("SUM", y, layers.to_rank(layers.cast(node.weight("bias"), y.dtype), 2))
    return (y,)


def embedding(node: Operands) -> tuple[Tensor, ...]:
    """Rows of the table by token id."""
    return (node.layers.gather(node.weight("weight"), node.inputs[0]),)


def gather_rows(node: Operands) -> tuple[Tensor, ...]:
    """The rows that want logits."""
    return (node.layers.gather(node.inputs[0], node.step["logits_indices"]),)
