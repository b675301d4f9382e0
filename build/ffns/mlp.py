"""The dense feed-forward block."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.converters.ffns import MlpConfig


def mlp(scope: Scope, x: str, config: MlpConfig) -> str:
    """down(act(gate x) * up x), or without a gate down(act(up x)), with the weights of the scope."""
    if config.gated:
        kind, gate_scale = config.activation, config.gate_multiplier
        (y,) = scope.call("gated_activation", "act", scope.linear(x, "gate_up"), kind=kind, gate_scale=gate_scale)
    else:
        (y,) = scope.call("activation", "act", scope.linear(x, "up"), kind=config.activation)
    y = scope.linear(y, "down")
    if config.down_multiplier != 1.0:
        (y,) = scope.call("scale", "scaled", y, by=config.down_multiplier)
    return y
