"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor

from hybridtrt.plugins.ragged import Step


def embedding(step: Step, ids: Tensor, *, weight: Tensor) -> Tensor:
    """`[T]` to `[T, hidden]`."""
    return weight[ids]
