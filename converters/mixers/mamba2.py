"""The state space duality layer (Mamba-2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class Mamba2Config:
    """State space duality layer (Mamba-2, arXiv 2405.21060).

    The output is gated by silu(z) and normed: "gated" takes the RMSNorm of the gated output, "before_gate" gates the
    normed output, "none" only gates. The norm runs over each of `norm_groups` equal parts of the channels.
    """

    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    conv_width: int
    conv_bias: bool = True
    in_bias: bool = False  # of the input projection
    out_bias: bool = False
    dt_min: float = 0.0  # dt is clamped to [dt_min, dt_max] after softplus
    dt_max: float | None = None  # no upper limit
    norm: Literal["gated", "before_gate", "none"] = "gated"
    norm_groups: int = 1
    norm_eps: float | None = None  # None: that of the model
    multipliers: tuple[float, ...] = ()  # of z, x, B, C and dt after the input projection; none: 1

    kind: ClassVar[str] = "mamba2"

    def __post_init__(self) -> None:
        if self.num_heads % self.n_groups:
            raise ValueError(f"mamba_n_groups={self.n_groups} does not divide mamba_n_heads={self.num_heads}")
        if len(self.multipliers) not in (0, 5):
            raise ValueError(f"{len(self.multipliers)} multipliers of z, x, B, C and dt")
        if self.inner % self.norm_groups:
            raise ValueError(f"{self.norm_groups} norm groups do not divide the {self.inner} channels of Mamba-2")

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.n_groups * self.d_state

    @property
    def norm_shape(self) -> tuple[int, ...]:
        """The output channels as the norm sees them."""
        return (self.inner,) if self.norm_groups == 1 else (self.norm_groups, self.inner // self.norm_groups)

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are z, x, B, C, dt; the convolution runs over x, B, C."""
        rows = self.inner + self.conv_dim + self.num_heads
        table = {
            "in_proj.weight": matrix(rows, hidden),
            "conv.weight": precise(self.conv_dim, self.conv_width),
            "A_log": precise(self.num_heads),
            "D": precise(self.num_heads),
            "dt_bias": precise(self.num_heads),
            "out_proj.weight": matrix(hidden, self.inner),
        }
        if self.norm != "none":
            table["norm.weight"] = precise(*self.norm_shape)
        if self.conv_bias:
            table["conv.bias"] = precise(self.conv_dim)
        if self.in_bias:
            table["in_proj.bias"] = precise(rows)
        if self.out_bias:
            table["out_proj.bias"] = precise(hidden)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.conv_dim, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.num_heads, self.head_dim, self.d_state)),
        ]
