"""From router logits to the chosen experts and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require

SCORINGS = ("softmax", "softmax_topk", "sigmoid", "sparsemixer")
GROUP_SCORES = ("top2", "max")


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    tokens, experts = inputs[0].shape
    top_k, scoring, groups = attributes["top_k"], attributes["scoring"], attributes.get("num_groups", 1)
    require(scoring in SCORINGS, f"scoring {scoring!r} is not one of {SCORINGS}")
    require(1 <= top_k <= int(experts), f"top_k={top_k} is not in 1..{experts}")
    if "selection_bias" in weights:
        bias = weights["selection_bias"].shape
        require(scoring != "sparsemixer" and bias == (experts,), f"selection_bias {bias} with {scoring} of {experts}")
    most = int(experts)
    if groups != 1:
        chosen, score = attributes.get("top_groups", 1), attributes.get("group_score", "top2")
        require(score in GROUP_SCORES, f"group_score {score!r} is not one of {GROUP_SCORES}")
        require(scoring != "sparsemixer" and int(experts) % groups == 0, f"{experts} experts in {groups} groups")
        size = int(experts) // groups
        fits = 1 <= chosen <= groups and top_k <= chosen * size and (score == "max" or size > 1)
        require(fits, f"top_k={top_k} from {chosen} of {groups} groups of {size} by {score}")
        most = chosen * size
    ranked = attributes.get("num_ranked", top_k)
    require(top_k <= ranked <= most, f"num_ranked={ranked} is not in {top_k}..{most}")
    return [TensorSpec((tokens, ranked)), TensorSpec((tokens, ranked), "int64")]


SPECS = (
    OpSpec(
        name="router",
        inputs=("logits",),  # [T, experts]
        optional_weights=("selection_bias",),  # [experts]
        attributes=(
            "top_k",
            "scoring",
            "renormalize",
            "renormalize_eps",
            "scaling",
            "num_groups",
            "top_groups",
            "group_score",
            "jitter_eps",
            "num_ranked",
        ),
        infer=_infer,
        flops=per_element(4),
        choices={"scoring": SCORINGS, "group_score": GROUP_SCORES},
    ),
)
