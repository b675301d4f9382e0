"""Root mean square norm over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def rms_norm(
    step: Step, x: Tensor, gate: Tensor | None = None, *, weight: Tensor, eps: float, gate_first: bool = False
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), times silu(gate) after the norm or, with `gate_first`, before it."""
    if gate is not None and gate_first:
        x = x * F.silu(gate)
    y = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return y * F.silu(gate) if gate is not None and not gate_first else y
