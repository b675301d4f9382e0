"""Root mean square norm (arXiv 1910.07467), with an optional SiLU or sigmoid gate before or after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import OpSpec, TensorSpec, per_element, require

GATES = ("sigmoid", "silu")


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    x, *gate = inputs
    shape = weights["weight"].shape if "weight" in weights else x.shape[-1:]
    require(shape in (x.shape[-1:], x.shape[1:]), f"weight {shape} does not norm x {x.shape}")
    require(all(g.shape == x.shape for g in gate), f"gate {[g.shape for g in gate]} differs from x {x.shape}")
    kind = attributes.get("gate_kind", "silu")
    require(kind in GATES, f"gate_kind {kind!r} is not one of {GATES}")
    return [x]


SPECS = (
    OpSpec(
        name="rms_norm",
        inputs=("x",),  # [T, ..., n]
        optional_inputs=("gate",),  # like x
        optional_weights=("weight",),  # [n], or like a token of x
        attributes=("eps", "gate_first", "gate_kind"),
        infer=_infer,
        flops=per_element(5),
        choices={"gate_kind": GATES},
    ),
)
