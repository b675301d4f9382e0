"""Root mean square norm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.pointwise.reference import activate
from hybridtrt.plugins.ragged import Step


def rms_norm(
    step: Step,
    x: Tensor,
    gate: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    eps: float,
    gate_first: bool = False,
    gate_kind: str = "silu",
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), times act(gate) after the norm or, with `gate_first`, before it.

    Without a weight it is 1. A norm of groups is that of `[T, groups, n]` with a weight `[groups, n]`.
    """
    if gate is not None and gate_first:
        x = x * activate(gate, gate_kind)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = weight * y
    return y * activate(gate, gate_kind) if gate is not None and not gate_first else y
