"""The selective state space layer (Mamba)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class Mamba1Config:
    """Selective state space layer (Mamba, arXiv 2312.00752)."""

    inner: int
    d_state: int
    dt_rank: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    dt_bc_norm: bool = False  # RMSNorm on dt, B and C (Jamba)

    kind: ClassVar[str] = "mamba1"

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are x, z; `x_proj` rows are dt (low rank), B, C."""
        table = {
            "in_proj.weight": matrix(2 * self.inner, hidden),
            "conv.weight": precise(self.inner, self.conv_width),
            "x_proj.weight": matrix(self.dt_rank + 2 * self.d_state, self.inner),
            "dt_proj.weight": matrix(self.inner, self.dt_rank),
            "dt_bias": precise(self.inner),
            "A_log": precise(self.inner, self.d_state),
            "D": precise(self.inner),
            "out_proj.weight": matrix(hidden, self.inner),
        }
        if self.conv_bias:
            table["conv.bias"] = precise(self.inner)
        if self.proj_bias:
            table["in_proj.bias"] = precise(2 * self.inner)
            table["out_proj.bias"] = precise(hidden)
        if self.dt_bc_norm:
            table["dt_norm.weight"] = precise(self.dt_rank)
            table["B_norm.weight"] = table["C_norm.weight"] = precise(self.d_state)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.inner, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.inner, self.d_state)),
        ]
