"""The dense feed-forward block."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.converters.ffns import MlpConfig


def gated_mlp(scope: Scope, x: str, activation: str) -> str:
    """down(act(gate x) * up x) with the weights `gate_up` and `down` of the scope."""
    (y,) = scope.call("gated_activation", "act", scope.linear(x, "gate_up"), kind=activation)
    return scope.linear(y, "down")


def mlp(scope: Scope, x: str, config: MlpConfig) -> str:
    """Gated MLP."""
    return gated_mlp(scope, x, config.activation)
