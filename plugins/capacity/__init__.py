"""Which pairs of token and expert run where an expert takes only so many tokens of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require

OVERFLOWS = ("drop", "next_best")


def expert_capacity(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Tokens of a step that one expert takes: ceil(factor * tokens * top_k / num_experts).

    At most all of them. What the product exceeds a whole number by through rounding does not count.
    """
    return math.ceil(min(factor * tokens * top_k / num_experts * (1 - 1e-12), tokens))


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    (tokens, ranked), experts = inputs[0].shape, inputs[1].shape
    top_k, count, factor = attributes["top_k"], attributes["num_experts"], attributes["factor"]
    require(experts == (tokens, ranked), f"weights {inputs[0].shape} and experts {experts} differ")
    require(1 <= top_k <= int(ranked), f"top_k={top_k} is not in 1..{ranked}")
    require(0 < factor < math.inf, f"factor {factor} is not a positive number")
    require(attributes["overflow"] in OVERFLOWS, f"overflow {attributes['overflow']!r} is not one of {OVERFLOWS}")
    chosen = (tokens, top_k)
    counts = TensorSpec((count,), "int32")
    return [TensorSpec(chosen), TensorSpec(chosen, "int64"), counts, counts]


SPECS = (
    OpSpec(
        name="capacity",
        inputs=("weights", "experts"),  # [T, ranked] each, best first: the first top_k are chosen
        attributes=("top_k", "num_experts", "factor", "overflow"),
        infer=_infer,
        flops=per_element(1),
        step_inputs=("cu_seqlens", "state_dst", "block_tables"),
        choices={"overflow": OVERFLOWS},
    ),
)
