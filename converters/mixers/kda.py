"""Kimi Delta Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class KdaConfig:
    """Gated delta rule with a decay of its own in each key channel (Kimi Delta Attention, arXiv 2510.26692)."""

    num_heads: int
    head_dim: int
    conv_width: int
    decay_rank: int | None = None  # of the two factors of the decay's projection; None: one matrix
    gate_rank: int | None = None  # the same for the output gate
    decay_bound: float | None = None  # the log decay of a token lies above it

    kind: ClassVar[str] = "kda"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return 3 * self.inner

    @property
    def projections(self) -> tuple[int, ...]:
        """Rows of `in_proj`: q, k, v together, b (beta), the decay and the output gate or their low rank."""
        return self.conv_dim, self.num_heads, self.decay_rank or self.inner, self.gate_rank or self.inner

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are those of `projections`, each head after head."""
        table = {
            "in_proj.weight": matrix(sum(self.projections), hidden),
            "conv.weight": precise(self.conv_dim, self.conv_width),
            "A_log": precise(self.num_heads),
            "dt_bias": precise(self.num_heads, self.head_dim),
            "norm.weight": precise(self.head_dim),
            "out_proj.weight": matrix(hidden, self.inner),
        }
        if self.decay_rank is not None:
            table["decay_up.weight"] = matrix(self.inner, self.decay_rank)
        if self.gate_rank is not None:
            table["gate_up.weight"] = matrix(self.inner, self.gate_rank)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.conv_dim, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.num_heads, self.head_dim, self.head_dim)),
        ]
