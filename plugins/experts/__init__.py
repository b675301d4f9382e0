"""The chosen experts' MLPs, weighted and summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.pointwise import GATED_ACTIVATIONS, check_activation
from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, routing, chosen = inputs
    up, down = weights["up"].shape, weights["down"].shape
    gated = attributes.get("gated", True)
    check_activation(attributes["activation"], gated)
    require(up[2] == x.shape[1] == down[1], f"up {up} and down {down} do not fit x {x.shape}")
    fits = up[0] == down[0] and up[1] == (2 if gated else 1) * int(down[2])
    require(fits, f"up {up} does not fit down {down}")
    for name, matrix in (("up_bias", up), ("down_bias", down)):
        if name in weights:
            require(weights[name].shape == matrix[:2], f"{name} {weights[name].shape} does not fit {matrix}")
    require(routing.shape == chosen.shape, f"weights {routing.shape} and experts {chosen.shape} differ")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    matrices = 3 if attributes.get("gated", True) else 2
    _, hidden, intermediate = weights["down"].shape
    return 2 * matrices * int(hidden) * int(intermediate) * load.size(inputs[1].shape)


def _experts_read(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    """The most experts that the tokens can choose."""
    return min(int(weights["down"].shape[0]), load.size(inputs[1].shape))


SPECS = (
    OpSpec(
        name="experts",
        inputs=("x", "weights", "experts"),  # [T, hidden], [T, k], [T, k] int64
        # up: [experts, 2 intermediate, hidden], gate rows first; not gated: [experts, intermediate, hidden]
        weights=("up", "down"),  # down: [experts, hidden, intermediate]
        optional_weights=("up_bias", "down_bias"),  # without the last axis of up and down
        attributes=("activation", "gated", "clamp"),
        infer=_infer,
        flops=_flops,
        rows_read=_experts_read,
        choices={"activation": GATED_ACTIVATIONS},
    ),
)
