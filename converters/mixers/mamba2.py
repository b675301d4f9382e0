"""The state space duality layer (Mamba-2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class Mamba2Config:
    """State space duality layer (Mamba-2, arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    dt_min: float = 0.0  # dt is clamped to [dt_min, dt_max] after softplus
    dt_max: float | None = None  # no upper limit

    kind: ClassVar[str] = "mamba2"

    def __post_init__(self) -> None:
        if self.num_heads % self.n_groups:
            raise ValueError(f"mamba_n_groups={self.n_groups} does not divide mamba_n_heads={self.num_heads}")

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.n_groups * self.d_state

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are z, x, B, C, dt; the convolution runs over x, B, C."""
        rows = self.inner + self.conv_dim + self.num_heads
        table = {
            "in_proj.weight": matrix(rows, hidden),
            "conv.weight": precise(self.conv_dim, self.conv_width),
            "A_log": precise(self.num_heads),
            "D": precise(self.num_heads),
            "dt_bias": precise(self.num_heads),
            "norm.weight": precise(self.inner),
            "out_proj.weight": matrix(hidden, self.inner),
        }
        if self.conv_bias:
            table["conv.bias"] = precise(self.conv_dim)
        if self.proj_bias:
            table["in_proj.bias"] = precise(rows)
            table["out_proj.bias"] = precise(hidden)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.conv_dim, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.num_heads, self.head_dim, self.d_state)),
        ]
