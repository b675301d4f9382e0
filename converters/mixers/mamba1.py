"""The selective state space layer (Mamba)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class Mamba1Config:
    """Selective state space layer (Mamba, arXiv 2312.00752).

    Heads cut the channels: each makes dt, B and C of its own channels. `x_proj` and `dt_proj` are then block-diagonal
    and stored with their zeros. dt (low rank), B and C may pass an RMSNorm, with weights and the model's epsilon
    ("weighted", Jamba) or without weights ("plain", Falcon Mamba).
    """

    inner: int
    d_state: int
    dt_rank: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    num_heads: int = 1
    dt_bc_norm: Literal["none", "weighted", "plain"] = "none"
    dt_bc_norm_eps: float = 1e-6  # of "plain"

    kind: ClassVar[str] = "mamba1"

    def __post_init__(self) -> None:
        if self.inner % self.num_heads:
            raise ValueError(f"n_mamba_heads={self.num_heads} does not divide the {self.inner} channels of Mamba")

    @property
    def dt_width(self) -> int:
        return self.num_heads * self.dt_rank

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are x, z; `x_proj` rows are dt (low rank), B, C, each head after head."""
        table = {
            "in_proj.weight": matrix(2 * self.inner, hidden),
            "conv.weight": precise(self.inner, self.conv_width),
            "x_proj.weight": matrix(self.dt_width + 2 * self.num_heads * self.d_state, self.inner),
            "dt_proj.weight": matrix(self.inner, self.dt_width),
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
        if self.dt_bc_norm == "weighted":
            table["dt_norm.weight"] = precise(self.dt_rank)
            table["B_norm.weight"] = table["C_norm.weight"] = precise(self.d_state)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.inner, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.inner, self.d_state)),
        ]
