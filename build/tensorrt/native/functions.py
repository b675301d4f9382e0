"""Activation functions by the names that operators know them by, in float32."""

from __future__ import annotations

from collections.abc import Callable

from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.tensor import Tensor


def _silu(layers: Layers, x: Tensor) -> Tensor:
    return layers.binary("PROD", x, layers.activation("SIGMOID", x))


def _relu2(layers: Layers, x: Tensor) -> Tensor:
    y = layers.activation("RELU", x)
    return layers.binary("PROD", y, y)


_FUNCTIONS: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "gelu": lambda layers, x: layers.activation("GELU_ERF", x),
    "gelu_tanh": lambda layers, x: layers.activation("GELU_TANH", x),
    "relu2": _relu2,
    "sigmoid": lambda layers, x: layers.activation("SIGMOID", x),
    "silu": _silu,
    "tanh": lambda layers, x: layers.activation("TANH", x),
}


def activate(layers: Layers, x: Tensor, kind: str) -> Tensor:
    """act(x), elementwise."""
    return _FUNCTIONS[kind](layers, x)


def glu(layers: Layers, gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up; "swiglu_oai" is (up + 1) * gate * sigmoid(1.702 * gate)."""
    if kind == "swiglu_oai":
        opened = layers.activation("SIGMOID", layers.multiply(gate, 1.702))
        more = layers.binary("SUM", up, layers.scalar(1.0, up))
        return layers.binary("PROD", layers.binary("PROD", more, gate), opened)
    return layers.binary("PROD", activate(layers, gate, kind), up)
