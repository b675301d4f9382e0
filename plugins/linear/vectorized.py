"""Dense projection with torch's GEMM, computed in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def linear(step: Step, x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, in]` to `[T, out]`."""
    return F.linear(x, weight, bias)
