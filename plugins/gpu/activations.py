"""The activation functions of `plugins/pointwise`, in the Triton language and in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import sigmoid, silu


@triton.jit
def tanh(x):
    """Without overflow; by its series (to x^9) where 1 - exp(-2 |x|) would lose digits."""
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation function named KIND, elementwise."""
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    elif KIND == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    elif KIND == "sigmoid":
        return sigmoid(x)
    elif KIND == "silu":
        return silu(x)
    else:
        tl.static_assert(KIND == "tanh")
        return tanh(x)


@triton.jit
def glu(gate, up, KIND: tl.constexpr, CLAMP: tl.constexpr):
    """act(gate) * up, as `pointwise.reference.glu` has it; CLAMP is None or a number."""
    if CLAMP is not None:
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
    if KIND == "swiglu_oai":
        return (up + 1.0) * gate * sigmoid(1.702 * gate)
    else:
        return activate(gate, KIND) * up
