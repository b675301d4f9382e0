"""Layer norm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def layer_norm(step: Step, x: Tensor, *, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, with the variance over n."""
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)) + bias
