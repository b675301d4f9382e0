"""Depthwise or grouped causal convolution (ONNX CausalConvWithState); its state is the last width - 1 inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    (x,), weight = inputs, weights["weight"]
    groups = len(weight.shape) == 2 or int(weight.shape[0]) % int(weight.shape[1]) == 0
    require(weight.shape[0] == x.shape[1] and groups, f"weight {weight.shape} does not fit x {x.shape}")
    require(attributes.get("activation") in (None, "silu"), f"activation {attributes.get('activation')!r} is not silu")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    return 2 * math.prod(int(dim) for dim in weights["weight"].shape[1:]) * load.size(inputs[0].shape)


SPECS = (
    OpSpec(
        name="causal_conv",
        inputs=("x",),  # [T, channels]
        weights=("weight",),  # [channels, width], or [channels, channels of a group, width]
        optional_weights=("bias",),  # [channels]
        caches=("state",),  # [slots, channels, width - 1], oldest first
        attributes=("activation",),
        step_inputs=("cu_seqlens", "state_src", "state_dst"),
        infer=_infer,
        flops=_flops,
        choices={"activation": ("silu",)},
    ),
)
