"""The gated short convolution of Liquid models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class ShortConvConfig:
    """C * conv(B * x), where B, C and x are projections of the input."""

    channels: int
    conv_width: int
    bias: bool = False  # of both projections and the convolution

    kind: ClassVar[str] = "short_conv"

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are B, C, x."""
        table = {
            "in_proj.weight": matrix(3 * self.channels, hidden),
            "conv.weight": precise(self.channels, self.conv_width),
            "out_proj.weight": matrix(hidden, self.channels),
        }
        if self.bias:
            table["in_proj.bias"] = precise(3 * self.channels)
            table["conv.bias"] = precise(self.channels)
            table["out_proj.bias"] = precise(hidden)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [StateSpec(f"{prefix}.conv_state", (self.channels, self.conv_width - 1))]
