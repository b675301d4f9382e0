"""A router that is an MLP and passes its state from layer to layer."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.converters.ffns import RouterMlpConfig


def router_mlp(scope: Scope, x: str, config: RouterMlpConfig) -> str:
    """Logits `[T, classes]`. The value `state` of this scope is what a later layer's router adds to its own."""
    first = config.previous_layer is None
    weights = {part: scope.weight(f"down.{part}") for part in ("weight", "bias")}
    (state,) = scope.program.call("linear", scope.path("state" if first else "down"), x, weights=weights)
    if not first:
        taken_up = scope.affine(f"layers.{config.previous_layer}.moe.router.state", "state_scale")
        (state,) = scope.call("add", "state", state, taken_up)
    h = scope.norm(state, "norm")
    for name in ("fc1", "fc2"):
        (h,) = scope.call("activation", f"{name}_act", scope.linear(h, name), kind="gelu")
    return scope.linear(h, "out")
