"""Root mean square norm (arXiv 1910.07467), with an optional SiLU gate before or after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, *gate = inputs
    require(weights["weight"].shape == x.shape[-1:], f"weight {weights['weight'].shape} does not norm x {x.shape}")
    require(all(g.shape == x.shape for g in gate), f"gate {[g.shape for g in gate]} differs from x {x.shape}")
    return [x]


SPECS = (
    OpSpec(
        name="rms_norm",
        inputs=("x",),  # [T, ..., n]
        optional_inputs=("gate",),  # like x
        weights=("weight",),  # [n]
        attributes=("eps", "gate_first"),
        infer=_infer,
        flops=per_element(5),
    ),
)
