"""Mixture of experts."""

from __future__ import annotations

from hybridtrt.build.ffns.mlp import gated_mlp
from hybridtrt.build.scope import Scope
from hybridtrt.converters.ffns import MoeConfig


def moe(scope: Scope, x: str, config: MoeConfig) -> str:
    """Routed experts, plus the shared expert where there is one."""
    weights, chosen = scope.call(
        "router",
        "routing",
        scope.linear(x, "router"),
        top_k=config.top_k,
        scoring=config.router.scoring,
        renormalize=config.router.renormalize,
    )
    (y,) = scope.program.call(
        "experts",
        scope.path("experts"),
        x,
        weights,
        chosen,
        weights={"gate_up": scope.path("experts.gate_up"), "down": scope.path("experts.down")},
        activation=config.activation,
    )
    if not config.shared_intermediate:
        return y
    shared = gated_mlp(scope.inner("shared"), x, config.activation)
    if config.shared_gate:
        (gate,) = scope.call("activation", "shared_opened", scope.linear(x, "shared_gate"), kind="sigmoid")
        (shared,) = scope.call("multiply", "shared_gated", shared, gate)
    return scope.call("add", "with_shared", y, shared)[0]
