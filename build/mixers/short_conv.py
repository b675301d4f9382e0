"""The gated short convolution of Liquid models."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import ShortConvConfig


def short_conv(scope: Scope, x: str, config: ShortConvConfig, shared: Shared) -> str:
    """C * conv(B * x) between two projections."""
    channels = (config.channels,)
    b, c, u = scope.split(scope.linear(x, "in_proj"), "split", channels, channels, channels)
    (u,) = scope.call("multiply", "gated_in", b, u)
    (y,) = scope.call("multiply", "gated_out", c, scope.conv(u, activation=None))
    return scope.linear(y, "out_proj")
