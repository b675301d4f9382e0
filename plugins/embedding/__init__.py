"""Token embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element


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
        flops=per_element(0),
        rows_read=per_element(1),
    ),
)
