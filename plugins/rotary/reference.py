"""Rotary position embedding in halves: channel i turns with channel i + rotary_dim / 2, the rest pass."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def rotary_table(step: Step, positions: Tensor, *, theta: float, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2 i / rotary_dim), `[T, rotary_dim / 2]` each, float32."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    angles = positions[:, None].float() * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def rotary(step: Step, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rotary_dim channels of every head of x `[T, heads, head_dim]`."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
