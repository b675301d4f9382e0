"""From router logits to the chosen experts and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require

SCORINGS = ("softmax", "softmax_topk")


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    tokens, experts = inputs[0].shape
    top_k, scoring = attributes["top_k"], attributes["scoring"]
    require(scoring in SCORINGS, f"scoring {scoring!r} is not one of {SCORINGS}")
    require(1 <= top_k <= int(experts), f"top_k={top_k} is not in 1..{experts}")
    return [TensorSpec((tokens, top_k)), TensorSpec((tokens, top_k), "int64")]


SPECS = (
    OpSpec(
        name="router",
        inputs=("logits",),  # [T, experts]
        attributes=("top_k", "scoring", "renormalize"),
        infer=_infer,
        flops=per_element(4),
    ),
)
