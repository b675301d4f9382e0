"""Elementwise arithmetic and activations."""

from __future__ import annotations

from hybridtrt.build.tensorrt.native.functions import activate, glu
from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.tensor import Tensor


def add(node: Operands) -> tuple[Tensor, ...]:
    """x + scale * y, with y broadcast over x."""
    layers, by = node.layers, node.attributes.get("scale", 1.0)
    if by == 1.0:
        x, y = node.inputs
        return (layers.binary("SUM", x, layers.cast(y, x.dtype)),)
    return (layers.binary("SUM", node.wide(), layers.multiply(node.wide(1), by)),)


def multiply(node: Operands) -> tuple[Tensor, ...]:
    """x * y, with y broadcast over x."""
    x, y = node.inputs
    return (node.layers.binary("PROD", x, node.layers.cast(y, x.dtype)),)


def scale(node: Operands) -> tuple[Tensor, ...]:
    """x times a constant."""
    return (node.layers.multiply(node.wide(), node.attributes["by"]),)


def affine(node: Operands) -> tuple[Tensor, ...]:
    """(x + bias) * weight."""
    layers, x = node.layers, node.wide()
    rank = x.rank
    if "bias" in node.roles:
        x = layers.binary("SUM", x, node.wide_weight("bias", rank))
    return (layers.binary("PROD", x, node.wide_weight("weight", rank)),)


def mean_heads(node: Operands) -> tuple[Tensor, ...]:
    """The mean of the heads of each group, `[T, groups, heads, n]` to `[T, groups, 1, n]`."""
    return (node.layers.mean(node.wide(), 2),)


def activation(node: Operands) -> tuple[Tensor, ...]:
    """act(x)."""
    return (activate(node.layers, node.wide(), node.attributes["kind"]),)


def gated_activation(node: Operands) -> tuple[Tensor, ...]:
    """act(gate_scale * gate) * up for x = [gate, up]."""
    layers, (x,) = node.layers, node.inputs
    half = x.shape[-1] // 2
    gate, up = (layers.cast(layers.slice(x, node.rows, i * half, half), "float32") for i in range(2))
    gate = layers.multiply(gate, node.attributes.get("gate_scale", 1.0))
    return (glu(layers, gate, up, node.attributes["kind"]),)
