"""Products with matrices, and rows of tables."""

from __future__ import annotations

from hybridtrt.build.tensorrt.layers import Tensor
from hybridtrt.build.tensorrt.native.operands import Operands


def linear(node: Operands) -> tuple[Tensor, ...]:
    """x W^T + b in the dtype of W."""
    layers = node.layers
    weight = node.weight("weight")
    x = node.inputs[0]
    y = layers.matmul(layers.cast_like(x, weight), weight)
    if "bias" in node.roles:
        y = layers.binary("SUM", y, layers.to_rank(layers.cast_like(node.weight("bias"), y), 2))
    return (y,)


def embedding(node: Operands) -> tuple[Tensor, ...]:
    """Rows of the table by token id."""
    return (node.layers.gather(node.weight("weight"), node.inputs[0]),)


def gather_rows(node: Operands) -> tuple[Tensor, ...]:
    """The rows that want logits."""
    return (node.layers.gather(node.inputs[0], node.step["logits_indices"]),)
