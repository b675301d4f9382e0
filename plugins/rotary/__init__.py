"""Rotary position embedding (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require


def _infer_table(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    half = len(attributes["inv_freq"])
    require(half > 0, "inv_freq is empty")
    return [TensorSpec(("T", half)), TensorSpec(("T", half))]


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, cos, sin = inputs
    head_dim, half = x.shape[-1], cos.shape[-1]
    require(isinstance(head_dim, int) and isinstance(half, int) and 2 * half <= head_dim, f"{x.shape} is too narrow")
    require(cos.shape == sin.shape, f"cos {cos.shape} differs from sin {sin.shape}")
    return [x]


SPECS = (
    OpSpec(
        name="rotary_table",
        inputs=("positions",),  # [T]
        attributes=("inv_freq", "attention_factor"),
        infer=_infer_table,
        flops=per_element(0),
    ),
    OpSpec(
        name="rotary",
        inputs=("x", "cos", "sin"),  # [T, heads, head_dim], [T, rotary_dim / 2] twice
        infer=_infer,
        flops=per_element(3),
        aliases=((0, 0),),
    ),
)
