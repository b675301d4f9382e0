"""Lightning attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class LightningConfig:
    """Linear attention whose heads decay at constant rates (Lightning Attention, arXiv 2401.04658)."""

    num_heads: int
    head_dim: int
    norm_eps: float
    activation: str = "silu"  # of q, k and v

    kind: ClassVar[str] = "lightning"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are q, k, v and the output gate, each head after head; exp(A_log) is a head's decay rate."""
        return {
            "in_proj.weight": matrix(4 * self.inner, hidden),
            "A_log": precise(self.num_heads),
            "norm.weight": precise(self.inner),
            "out_proj.weight": matrix(hidden, self.inner),
        }

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [StateSpec(f"{prefix}.state", (self.num_heads, self.head_dim, self.head_dim))]
