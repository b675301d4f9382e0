"""Layer norm (arXiv 1607.06450)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    (x,) = inputs
    for name, weight in weights.items():
        require(weight.shape == x.shape[-1:], f"{name} {weight.shape} does not norm x {x.shape}")
    return [x]


SPECS = (
    OpSpec(
        name="layer_norm",
        inputs=("x",),  # [T, ..., n]
        weights=("weight", "bias"),  # [n]
        attributes=("eps",),
        infer=_infer,
        flops=per_element(7),
    ),
)
