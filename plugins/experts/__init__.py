"""The chosen experts' MLPs, weighted and summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.experts.quantized import form_of
from hybridtrt.plugins.pointwise import GATED_ACTIVATIONS, check_activation
from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def intermediate_size(up: TensorSpec, gated: bool) -> int:
    """Numbers between up and down, of an expert."""
    return int(up.shape[1]) // (2 if gated else 1)


def _width(role: str, weights: Mapping[str, TensorSpec], inputs: int) -> int:
    """Inputs of a matrix, where it has scales `inputs` if these fit."""
    if f"{role}_scale" not in weights:
        return int(weights[role].shape[2])
    form_of(role, weights[role], weights[f"{role}_scale"], inputs)
    return inputs


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, routing, chosen = inputs
    up, down = weights["up"].shape, weights["down"].shape
    gated = attributes.get("gated", True)
    check_activation(attributes["activation"], gated)
    hidden, inner = int(x.shape[1]), intermediate_size(weights["up"], gated)
    require(_width("up", weights, hidden) == hidden == down[1], f"up {up} and down {down} do not fit x {x.shape}")
    fits = up[0] == down[0] and up[1] == (2 if gated else 1) * inner and _width("down", weights, inner) == inner
    require(fits, f"up {up} does not fit down {down}")
    for name, matrix in (("up_bias", up), ("down_bias", down)):
        if name in weights:
            require(weights[name].shape == matrix[:2], f"{name} {weights[name].shape} does not fit {matrix}")
    require(routing.shape == chosen.shape, f"weights {routing.shape} and experts {chosen.shape} differ")
    return [x]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    gated = attributes.get("gated", True)
    matrices, intermediate = 3 if gated else 2, intermediate_size(weights["up"], gated)
    return 2 * matrices * int(weights["down"].shape[1]) * intermediate * load.size(inputs[1].shape)


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
        # biases have no last axis; with scales up and down are quantised: see quantized.py
        optional_weights=("up_bias", "down_bias", "up_scale", "down_scale"),
        attributes=("activation", "gated", "clamp"),
        infer=_infer,
        flops=_flops,
        rows_read=_experts_read,
        choices={"activation": GATED_ACTIVATIONS},
    ),
)
