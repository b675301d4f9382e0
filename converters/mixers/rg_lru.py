"""The recurrent block of Griffin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class RgLruConfig:
    """Real-gated linear recurrent unit (Griffin, arXiv 2402.19427) behind a causal convolution, beside a gate."""

    channels: int
    num_heads: int  # blocks of the gates
    conv_width: int
    activation: str = "gelu_tanh"  # of the gate

    kind: ClassVar[str] = "rg_lru"

    def __post_init__(self) -> None:
        if self.channels % self.num_heads:
            raise ValueError(f"num_attention_heads={self.num_heads} does not divide lru_width={self.channels}")

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are the gate y, then x; gates of the recurrence are `[heads, input, output]` channels."""
        blocks = (self.num_heads, self.channels // self.num_heads, self.channels // self.num_heads)
        return {
            "in_proj.weight": matrix(2 * self.channels, hidden),
            "in_proj.bias": precise(2 * self.channels),
            "conv.weight": precise(self.channels, self.conv_width),
            "conv.bias": precise(self.channels),
            "input_gate": precise(*blocks),
            "input_bias": precise(self.channels),
            "recurrence_gate": precise(*blocks),
            "recurrence_bias": precise(self.channels),
            "decay": precise(self.channels),
            "out_proj.weight": matrix(hidden, self.channels),
            "out_proj.bias": precise(hidden),
        }

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.channels, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.channels,)),
        ]
