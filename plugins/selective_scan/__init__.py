"""Selective scan, the recurrence of Mamba (arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, dt, B, C = inputs
    require(dt.shape == x.shape, f"dt {dt.shape} and x {x.shape} differ")
    require(B.shape == C.shape, f"B {B.shape} and C {C.shape} differ")
    require(int(x.shape[1]) % int(B.shape[1]) == 0, f"{B.shape[1]} groups do not divide {x.shape[1]} channels")
    require(weights["A_log"].shape == (x.shape[1], B.shape[2]), f"A_log {weights['A_log'].shape} does not fit")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    return 7 * int(inputs[2].shape[2]) * load.size(inputs[0].shape)


SPECS = (
    OpSpec(
        name="selective_scan",
        inputs=("x", "dt", "b", "c"),  # [T, channels] twice, [T, groups, N] twice: of equal numbers of channels
        weights=("A_log", "D", "dt_bias"),  # [channels, N], [channels] twice
        caches=("state",),  # [slots, channels, N]
        step_inputs=("cu_seqlens", "state_src", "state_dst"),
        infer=_infer,
        flops=_flops,
    ),
)
