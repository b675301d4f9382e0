"""Elementwise arithmetic, activations, and the moves between layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require

ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "sigmoid", "silu", "tanh")
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oai")

Weights = Mapping[str, TensorSpec]
Attributes = Mapping[str, Any]


def _same(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    return [inputs[0]]


def _pair(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    x, y = inputs
    fits = len(x.shape) == len(y.shape) and all(b in (a, 1) for a, b in zip(x.shape, y.shape, strict=True))
    require(fits, f"{y.shape} does not broadcast to {x.shape}")
    return [x]


def check_activation(kind: str, gated: bool = False) -> None:
    """Raise `ValueError` for an activation that is not known."""
    known = GATED_ACTIVATIONS if gated else ACTIVATIONS
    require(kind in known, f"activation {kind!r} is not one of {known}")


def _affine(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    (x,) = inputs
    for name, weight in weights.items():
        fits = len(weight.shape) == len(x.shape) - 1 and all(
            b in (a, 1) for a, b in zip(x.shape[1:], weight.shape, strict=True)
        )
        require(fits, f"{name} {weight.shape} does not broadcast to a token of {x.shape}")
    return [x]


def _mean_heads(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    (x,) = inputs
    require(len(x.shape) == 4, f"{x.shape} is not [T, groups, heads, n]")
    return [TensorSpec((*x.shape[:2], 1, x.shape[3]), x.dtype)]


def _activation(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    check_activation(attributes["kind"])
    return [inputs[0]]


def _gated_activation(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    check_activation(attributes["kind"], gated=True)
    *lead, last = inputs[0].shape
    require(isinstance(last, int) and last % 2 == 0, f"{inputs[0].shape} does not end in two equal halves")
    return [TensorSpec((*lead, int(last) // 2), inputs[0].dtype)]


def _split(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    (x,), shapes = inputs, attributes["shapes"]
    total = sum(math.prod(shape) for shape in shapes)
    require(x.shape[1:] == (total,), f"{x.shape} does not split into {shapes}")
    return [TensorSpec((x.shape[0], *shape), x.dtype) for shape in shapes]


def _concat(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    x, y = inputs
    require(x.shape[:-1] == y.shape[:-1], f"{x.shape} and {y.shape} differ in more than the last dimension")
    return [TensorSpec((*x.shape[:-1], int(x.shape[-1]) + int(y.shape[-1])), x.dtype)]


def _flatten(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    first, *rest = inputs[0].shape
    return [TensorSpec((first, math.prod(int(dim) for dim in rest)), inputs[0].dtype)]


def _gather_rows(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    return [TensorSpec(("R", *inputs[0].shape[1:]), inputs[0].dtype)]


SPECS = (
    OpSpec("add", _pair, per_element(2), inputs=("x", "y"), attributes=("scale",), aliases=((0, 0),)),
    OpSpec("multiply", _pair, per_element(1), inputs=("x", "y"), aliases=((0, 0),)),
    OpSpec("scale", _same, per_element(1), inputs=("x",), attributes=("by",), aliases=((0, 0),)),
    OpSpec(
        "affine",
        _affine,
        per_element(2),
        inputs=("x",),
        weights=("weight",),
        optional_weights=("bias",),
        aliases=((0, 0),),
    ),
    OpSpec("mean_heads", _mean_heads, per_element(1), inputs=("x",)),
    OpSpec(
        "activation",
        _activation,
        per_element(4),
        inputs=("x",),
        attributes=("kind",),
        aliases=((0, 0),),
        choices={"kind": ACTIVATIONS},
    ),
    OpSpec(
        "gated_activation",
        _gated_activation,
        per_element(3),
        inputs=("x",),
        attributes=("kind", "gate_scale"),
        choices={"kind": GATED_ACTIVATIONS},
    ),
    OpSpec("split", _split, per_element(0), inputs=("x",), attributes=("shapes",)),
    OpSpec("concat", _concat, per_element(0), inputs=("x", "y")),
    OpSpec("flatten", _flatten, per_element(0), inputs=("x",), aliases=((0, 0),)),
    OpSpec("gather_rows", _gather_rows, per_element(0), inputs=("x",), step_inputs=("logits_indices",)),
)
