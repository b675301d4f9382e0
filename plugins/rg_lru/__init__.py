"""The real-gated linear recurrent unit (Griffin, arXiv 2402.19427)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    (x,) = inputs
    heads, width, out = weights["input_gate"].shape
    require(width == out and x.shape[1:] == (int(heads) * int(width),), f"gates of {heads} x {width} do not fit {x}")
    for name in ("input_gate", "recurrence_gate"):
        require(weights[name].shape == (heads, width, width), f"{name} {weights[name].shape} does not fit")
    for name in ("input_bias", "recurrence_bias", "decay"):
        require(weights[name].shape == x.shape[1:], f"{name} {weights[name].shape} does not fit {x.shape}")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    return (4 * int(weights["input_gate"].shape[1]) + 12) * load.size(inputs[0].shape)


SPECS = (
    OpSpec(
        name="rg_lru",
        inputs=("x",),  # [T, channels]
        # Gates are block diagonal, [heads, width, width] from input to output channel; the rest is [channels].
        weights=("input_gate", "input_bias", "recurrence_gate", "recurrence_bias", "decay"),
        caches=("state",),  # [slots, channels]
        step_inputs=("positions", "cu_seqlens", "state_src", "state_dst"),
        infer=_infer,
        flops=_flops,
    ),
)
