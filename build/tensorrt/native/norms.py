"""RMS norm and layer norm over the last axis, in float32.

They are written out in elementary layers, which TensorRT fuses: its own normalisation layer differs from release to
release.
"""

from __future__ import annotations

from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.native.functions import activate
from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.tensor import Tensor


def rms_norm(node: Operands) -> tuple[Tensor, ...]:
    """weight * x / sqrt(mean(x^2) + eps), times act(gate) after the norm or, with `gate_first`, before it."""
    layers, attributes = node.layers, node.attributes
    x, gate = node.wide(), None
    rank = x.rank
    if len(node.inputs) > 1:
        gate = activate(layers, node.wide(1), attributes.get("gate_kind", "silu"))
    gate_first = attributes.get("gate_first", False)
    if gate is not None and gate_first:
        x = layers.binary("PROD", x, gate)
    y = _normed(layers, x, attributes["eps"])
    if "weight" in node.roles:
        y = layers.binary("PROD", y, node.wide_weight("weight", rank))
    if gate is not None and not gate_first:
        y = layers.binary("PROD", y, gate)
    return (y,)


def layer_norm(node: Operands) -> tuple[Tensor, ...]:
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias."""
    layers, x = node.layers, node.wide()
    rank = x.rank
    centred = layers.binary("SUB", x, layers.mean(x, rank - 1))
    y = layers.binary("PROD", _normed(layers, centred, node.attributes["eps"]), node.wide_weight("weight", rank))
    return (layers.binary("SUM", y, node.wide_weight("bias", rank)),)


def _normed(layers: Layers, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps)."""
    squares = layers.mean(layers.binary("PROD", x, x), x.rank - 1)
    root = layers.unary("SQRT", layers.binary("SUM", squares, layers.scalar(eps, x)))
    return layers.binary("DIV", x, root)
