"""Elementwise arithmetic, activations, and the moves between layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require

ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "sigmoid", "silu")

Weights = Mapping[str, TensorSpec]
Attributes = Mapping[str, Any]


def _same(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    return [inputs[0]]


def _pair(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    x, y = inputs
    fits = len(x.shape) == len(y.shape) and all(b in (a, 1) for a, b in zip(x.shape, y.shape, strict=True))
    require(fits, f"{y.shape} does not broadcast to {x.shape}")
    return [x]


def _check_activation(attributes: Attributes) -> None:
    require(attributes["kind"] in ACTIVATIONS, f"activation {attributes['kind']!r} is not one of {ACTIVATIONS}")


def _activation(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    _check_activation(attributes)
    return [inputs[0]]


def _gated_activation(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    _check_activation(attributes)
    *lead, last = inputs[0].shape
    require(isinstance(last, int) and last % 2 == 0, f"{inputs[0].shape} does not end in two equal halves")
    return [TensorSpec((*lead, int(last) // 2), inputs[0].dtype)]


def _split(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    (x,), shapes = inputs, attributes["shapes"]
    total = sum(math.prod(shape) for shape in shapes)
    require(x.shape[1:] == (total,), f"{x.shape} does not split into {shapes}")
    return [TensorSpec((x.shape[0], *shape), x.dtype) for shape in shapes]


def _flatten(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    first, *rest = inputs[0].shape
    return [TensorSpec((first, math.prod(int(dim) for dim in rest)), inputs[0].dtype)]


def _gather_rows(inputs: list[TensorSpec], weights: Weights, attributes: Attributes) -> list[TensorSpec]:
    return [TensorSpec(("R", *inputs[0].shape[1:]), inputs[0].dtype)]


SPECS = (
    OpSpec("add", _pair, per_element(2), inputs=("x", "y"), attributes=("scale",), aliases=((0, 0),)),
    OpSpec("multiply", _pair, per_element(1), inputs=("x", "y"), aliases=((0, 0),)),
    OpSpec("scale", _same, per_element(1), inputs=("x",), attributes=("by",), aliases=((0, 0),)),
    OpSpec("activation", _activation, per_element(4), inputs=("x",), attributes=("kind",), aliases=((0, 0),)),
    OpSpec("gated_activation", _gated_activation, per_element(3), inputs=("x",), attributes=("kind",)),
    OpSpec("split", _split, per_element(0), inputs=("x",), attributes=("shapes",)),
    OpSpec("flatten", _flatten, per_element(0), inputs=("x",), aliases=((0, 0),)),
    OpSpec("gather_rows", _gather_rows, per_element(0), inputs=("x",), step_inputs=("logits_indices",)),
)
