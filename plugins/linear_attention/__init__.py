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
    rule, bound = attributes["rule"], attributes.get("decay_bound")
    require(rule in RULES, f"rule {rule!r} is not one of {RULES}")
    require(q.shape == k.shape, f"q {q.shape} and k {k.shape} differ")
    require(int(v.shape[1]) % int(k.shape[1]) == 0, f"{k.shape[1]} key heads do not divide {v.shape[1]} value heads")
    require(("gated" in rule) == ("A_log" in weights), f"rule {rule!r} does not take {set(weights)}")
    require("A_log" in weights or "dt_bias" not in weights, "dt_bias without A_log")
    require(bound is None or ("dt_bias" in weights and bound < 0), f"decay_bound={bound} without gate or not below 0")
    count = ("dt_bias" in weights) + ("delta" in rule)
    require(len(gates) == count, f"rule {rule!r} with {set(weights)} takes {count} gate inputs, not {len(gates)}")
    per_head, per_channel = v.shape[:2], (*v.shape[:2], k.shape[2])
    if "dt_bias" in weights:
        a, bias = gates.pop(0).shape, weights["dt_bias"].shape
        require(a in (per_head, per_channel), f"gate {a} is neither {per_head} nor {per_channel}")
        require(bias == a[1:], f"dt_bias {bias} does not fit gate {a}")
    require(all(b.shape == per_head for b in gates), f"gate {[b.shape for b in gates]} is not [T, heads]")
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
        # a `[T, heads]`, or `[T, heads, K]` for a decay of its own in each key channel, where the rule is gated and
        # the decay depends on the token; then b `[T, heads]` where the rule is delta.
        optional_inputs=("gate_1", "gate_2"),
        optional_weights=("A_log", "dt_bias"),  # [heads], [heads] or [heads, K]; without dt_bias the decay is constant
        caches=("state",),  # [slots, heads, K, V]
        attributes=("rule", "scale", "l2_norm", "decay_bound", "beta_scale"),
        step_inputs=("cu_seqlens", "state_src", "state_dst"),
        optional_step_inputs=("token_slots",),  # to roll back drafts
        infer=_infer,
        flops=_flops,
        choices={"rule": RULES},
    ),
)
