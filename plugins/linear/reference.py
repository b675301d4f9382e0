"""y = x W^T + b, computed in the dtype of x."""

from __future__ import annotations

from torch import Tensor

from hybridtrt.plugins.ragged import Step


def linear(step: Step, x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, in]` to `[T, out]`."""
    y = x @ weight.to(x.dtype).T
    return y if bias is None else y + bias
