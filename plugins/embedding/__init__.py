"""Token embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, elementwise_flops


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    return [TensorSpec((*inputs[0].shape, weights["weight"].shape[1]))]


SPECS = (
    OpSpec(
        name="embedding",
        inputs=("ids",),  # [T]
        weights=("weight",),  # [vocab, hidden]
        infer=_infer,
        flops=elementwise_flops(0),
    ),
)
