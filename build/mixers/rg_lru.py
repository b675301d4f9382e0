"""The recurrent block of Griffin."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import RgLruConfig

WEIGHTS = ("input_gate", "input_bias", "recurrence_gate", "recurrence_bias", "decay")


def rg_lru(scope: Scope, x: str, config: RgLruConfig, shared: Shared) -> str:
    """The recurrence over a convolution, times an activated gate."""
    gate, u = scope.split(scope.linear(x, "in_proj"), "split", (config.channels,), (config.channels,))
    (y,) = scope.program.call(
        "rg_lru",
        scope.path("core"),
        scope.conv(u, activation=None),
        weights={name: scope.weight(name) for name in WEIGHTS},
        caches={"state": scope.path("state")},
    )
    (opened,) = scope.call("activation", "gate", gate, kind=config.activation)
    (y,) = scope.call("multiply", "gated", y, opened)
    return scope.linear(y, "out_proj")
