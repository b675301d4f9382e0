"""The chosen experts' gated MLPs, weighted and summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, routing, chosen = inputs
    gate_up, down = weights["gate_up"].shape, weights["down"].shape
    require(gate_up[2] == x.shape[1] == down[1], f"gate_up {gate_up} and down {down} do not fit x {x.shape}")
    require(gate_up[0] == down[0] and gate_up[1] == 2 * int(down[2]), f"gate_up {gate_up} does not fit down {down}")
    require(routing.shape == chosen.shape, f"weights {routing.shape} and experts {chosen.shape} differ")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    _, hidden, intermediate = weights["down"].shape
    return 6 * int(hidden) * int(intermediate) * load.size(inputs[1].shape)


def _experts_read(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    """The most experts that the tokens can choose."""
    return min(int(weights["down"].shape[0]), load.size(inputs[1].shape))


SPECS = (
    OpSpec(
        name="experts",
        inputs=("x", "weights", "experts"),  # [T, hidden], [T, k], [T, k] int64
        weights=("gate_up", "down"),  # [experts, 2 intermediate, hidden], [experts, hidden, intermediate]
        attributes=("activation",),
        infer=_infer,
        flops=_flops,
        rows_read=_experts_read,
    ),
)
