"""State space duality, the recurrence of Mamba-2 (arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, dt, B, C = inputs
    require(B.shape == C.shape, f"B {B.shape} and C {C.shape} differ")
    require(dt.shape == x.shape[:2], f"dt {dt.shape} does not fit x {x.shape}")
    require(int(x.shape[1]) % int(B.shape[1]) == 0, f"{B.shape[1]} groups do not divide {x.shape[1]} heads")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    return 5 * int(inputs[2].shape[2]) * load.size(inputs[0].shape)


SPECS = (
    OpSpec(
        name="ssd",
        inputs=("x", "dt", "b", "c"),  # [T, heads, P], [T, heads], [T, groups, N] twice
        weights=("A_log", "D", "dt_bias"),  # [heads]
        caches=("state",),  # [slots, heads, P, N]
        attributes=("dt_min", "dt_max"),
        step_inputs=("cu_seqlens", "state_src", "state_dst"),
        infer=_infer,
        flops=_flops,
    ),
)
