"""Dense projection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    (x,), weight = inputs, weights["weight"]
    require(len(x.shape) == 2, f"x {x.shape} is not [T, in]")
    require(weight.shape[1:] == x.shape[1:], f"weight {weight.shape} does not take x {x.shape}")
    if "bias" in weights:
        require(weights["bias"].shape == weight.shape[:1], f"bias {weights['bias'].shape} does not fit {weight.shape}")
    return [TensorSpec((x.shape[0], weight.shape[0]), x.dtype)]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    return 2 * load.size(inputs[0].shape[:1]) * math.prod(int(dim) for dim in weights["weight"].shape)


SPECS = (
    OpSpec(
        name="linear",
        inputs=("x",),  # [T, in]
        weights=("weight",),  # [out, in]
        optional_weights=("bias",),  # [out]
        infer=_infer,
        flops=_flops,
    ),
)
