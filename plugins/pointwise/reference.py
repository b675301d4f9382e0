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
}


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply the activation function named `kind`, elementwise."""
    return _FUNCTIONS[kind](x)


def add(step: Step, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """x + scale * y, with y broadcast over x."""
    return torch.add(x, y, alpha=scale)


def multiply(step: Step, x: Tensor, y: Tensor) -> Tensor:
    """x * y, with y broadcast over x."""
    return x * y


def scale(step: Step, x: Tensor, *, by: float) -> Tensor:
    """x times a constant."""
    return x * by


def activation(step: Step, x: Tensor, *, kind: str) -> Tensor:
    """act(x)."""
    return activate(x, kind)


def gated_activation(step: Step, x: Tensor, *, kind: str) -> Tensor:
    """act(gate) * up for x = [gate, up], `[..., 2 n]` to `[..., n]`."""
    gate, up = x.chunk(2, dim=-1)
    return activate(gate, kind) * up


def split(step: Step, x: Tensor, *, shapes: list[list[int]]) -> tuple[Tensor, ...]:
    """Cut `[T, n]` along n into `[T, *shape]` for each of `shapes`."""
    parts = x.split([math.prod(shape) for shape in shapes], dim=1)
    return tuple(part.unflatten(1, list(shape)) for part, shape in zip(parts, shapes, strict=True))


def flatten(step: Step, x: Tensor) -> Tensor:
    """`[T, ...]` to `[T, n]`."""
    return x.flatten(1)


def gather_rows(step: Step, x: Tensor) -> Tensor:
    """The rows of x that want logits, `[T, ...]` to `[R, ...]`."""
    return x[step.logits_indices]
