"""Elementwise arithmetic, activations, and the moves between layouts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply the activation function named `kind`, elementwise."""
    return _FUNCTIONS[kind](x)


def glu(x: Tensor, kind: str, gate_scale: float = 1.0, clamp: float | None = None) -> Tensor:
    """act(gate_scale * gate) * up for x = [gate, up], `[..., 2 n]` to `[..., n]`.

    With `clamp` gate is at most that and up within plus and minus that. "swiglu_oai" is (up + 1) * gate *
    sigmoid(1.702 * gate).
    """
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if gate_scale != 1.0:
        gate = gate * gate_scale
    if kind == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return activate(gate, kind) * up


def add(step: Step, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """x + scale * y, with y broadcast over x."""
    return torch.add(x, y, alpha=scale)


def multiply(step: Step, x: Tensor, y: Tensor) -> Tensor:
    """x * y, with y broadcast over x."""
    return x * y


def scale(step: Step, x: Tensor, *, by: float) -> Tensor:
    """x times a constant."""
    return x * by


def affine(step: Step, x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(x + bias) * weight, both broadcast over the tokens of x."""
    return (x if bias is None else x + bias) * weight


def mean_heads(step: Step, x: Tensor) -> Tensor:
    """The mean of the heads of each group, `[T, groups, heads, n]` to `[T, groups, 1, n]`."""
    return x.mean(2, keepdim=True)


def activation(step: Step, x: Tensor, *, kind: str) -> Tensor:
    """act(x)."""
    return activate(x, kind)


def gated_activation(step: Step, x: Tensor, *, kind: str, gate_scale: float = 1.0) -> Tensor:
    """act(gate_scale * gate) * up for x = [gate, up], `[..., 2 n]` to `[..., n]`."""
    return glu(x, kind, gate_scale)


def split(step: Step, x: Tensor, *, shapes: list[list[int]]) -> tuple[Tensor, ...]:
    """Cut `[T, n]` along n into `[T, *shape]` for each of `shapes`."""
    parts = x.split([math.prod(shape) for shape in shapes], dim=1)
    return tuple(part.unflatten(1, list(shape)) for part, shape in zip(parts, shapes, strict=True))


def concat(step: Step, x: Tensor, y: Tensor) -> Tensor:
    """x and y along the last dimension, `[..., n]` and `[..., m]` to `[..., n + m]`."""
    return torch.cat([x, y], dim=-1)


def flatten(step: Step, x: Tensor) -> Tensor:
    """`[T, ...]` to `[T, n]`."""
    return x.flatten(1)


def gather_rows(step: Step, x: Tensor) -> Tensor:
    """The rows of x that want logits, `[T, ...]` to `[R, ...]`."""
    return x[step.logits_indices]
