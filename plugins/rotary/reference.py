"""Rotary position embedding in halves: channel i turns with channel i + rotary_dim / 2, the rest pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def rotary_table(
    step: Step, positions: Tensor, *, inv_freq: Sequence[float], attention_factor: float
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq times `attention_factor`, `[T, rotary_dim / 2]` each, float32.

    Angles are float32, as in all models; what is taken of them is exact but for one rounding.
    """
    angles = (positions[:, None].float() * torch.tensor(inv_freq, dtype=torch.float32)).double()
    return (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()


def rotary(step: Step, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rotary_dim channels of every head of x `[T, heads, head_dim]`."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
