"""Linear attention and its delta-rule and decaying relatives (after ONNX LinearAttention, with raw gates in)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require

RULES = ("linear", "gated", "delta", "gated_delta")


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    q, k, v, *gates = inputs
    rule = attributes["rule"]
    require(rule in RULES, f"rule {rule!r} is not one of {RULES}")
    require(q.shape == k.shape, f"q {q.shape} and k {k.shape} differ")
    require(int(v.shape[1]) % int(k.shape[1]) == 0, f"{k.shape[1]} key heads do not divide {v.shape[1]} value heads")
    count = ("gated" in rule) + ("delta" in rule)
    require(len(gates) == count, f"rule {rule!r} takes {count} gate inputs, not {len(gates)}")
    require(
        all(gate.shape == v.shape[:2] for gate in gates), f"gates {[gate.shape for gate in gates]} are not [T, heads]"
    )
    require(("gated" in rule) == ({"A_log", "dt_bias"} == set(weights)), f"rule {rule!r} does not take {set(weights)}")
    return [v]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    state = int(inputs[0].shape[2]) * load.size(inputs[2].shape)
    return state * (7 if "delta" in attributes["rule"] else 5)


SPECS = (
    OpSpec(
        name="linear_attention",
        inputs=("q", "k", "v"),  # [T, key_heads, K] twice, [T, heads, V]
        optional_inputs=("gate_1", "gate_2"),  # [T, heads]: a where the rule is gated, then b where it is delta
        optional_weights=("A_log", "dt_bias"),  # [heads]
        caches=("state",),  # [slots, heads, K, V]
        attributes=("rule", "scale", "l2_norm"),
        step_inputs=("cu_seqlens", "state_src", "state_dst"),
        infer=_infer,
        flops=_flops,
    ),
)
