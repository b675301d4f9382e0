"""Feed-forward blocks as operator calls: `[T, hidden]` to `[T, hidden]`, one function a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtrt.build.scope import Scope
from hybridtrt.converters.ffns import MlpConfig, MoeConfig


def gated_mlp(scope: Scope, x: str, activation: str) -> str:
    """down(act(gate x) * up x) with the weights `gate_up` and `down` of the scope."""
    (y,) = scope.call("gated_activation", "act", scope.linear(x, "gate_up"), kind=activation)
    return scope.linear(y, "down")


def mlp(scope: Scope, x: str, config: MlpConfig) -> str:
    """Gated MLP."""
    return gated_mlp(scope, x, config.activation)


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


FFNS: dict[str, Callable[[Scope, str, Any], str]] = {function.__name__: function for function in (mlp, moe)}
