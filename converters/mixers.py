"""Token mixers: their hyperparameters, canonical weights and caches.

Every mixer has a `kind`, `weights(hidden)` (names relative to `layers.{i}.{kind}.`) and `caches(prefix)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, PageSpec, StateSpec


@dataclass(frozen=True)
class AttentionConfig:
    """Causal softmax attention with grouped key/value heads (GQA) over a paged cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False  # of the q, k and v projections
    dense_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each q and k head
    output_gate: bool = False  # sigmoid gate from the query projection, on the attention output
    rope: bool = True
    window: int | None = None

    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_heads}"
            )

    def weights(self, hidden: int) -> WeightTable:
        """`qkv` rows are q, then the output gate if there is one, then k, then v."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = q * (2 if self.output_gate else 1) + 2 * kv
        table = {"qkv.weight": matrix(rows, hidden), "dense.weight": matrix(hidden, q)}
        if self.bias:
            table["qkv.bias"] = precise(rows)
        if self.dense_bias:
            table["dense.bias"] = precise(hidden)
        if self.qk_norm:
            table["q_norm.weight"] = table["k_norm.weight"] = precise(self.head_dim)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        """K and V of one token: `[2, num_kv_heads, head_dim]`."""
        group = "full_attention" if self.window is None else f"window_{self.window}"
        return [PageSpec(f"{prefix}.kv", group, (2, self.num_kv_heads, self.head_dim), window=self.window)]


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated delta rule (Gated DeltaNet, arXiv 2412.06464) behind a causal convolution."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int

    kind: ClassVar[str] = "gated_delta"

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"linear_num_key_heads={self.num_k_heads} does not divide linear_num_value_heads={self.num_v_heads}"
            )

    @property
    def k_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def v_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.k_dim + self.v_dim

    def weights(self, hidden: int) -> WeightTable:
        """`in_proj` rows are q, k, v, z (the output gate), b (beta) and a (the decay), each head after head."""
        return {
            "in_proj.weight": matrix(self.conv_dim + self.v_dim + 2 * self.num_v_heads, hidden),
            "conv.weight": precise(self.conv_dim, self.conv_width),
            "A_log": precise(self.num_v_heads),
            "dt_bias": precise(self.num_v_heads),
            "norm.weight": precise(self.head_v_dim),
            "out_proj.weight": matrix(hidden, self.v_dim),
        }

    def caches(self, prefix: str) -> list[CacheSpec]:
        return [
            StateSpec(f"{prefix}.conv_state", (self.conv_dim, self.conv_width - 1)),
            StateSpec(f"{prefix}.state", (self.num_v_heads, self.head_k_dim, self.head_v_dim)),
        ]


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


Mixer = AttentionConfig | GatedDeltaConfig | Mamba1Config | Mamba2Config
MIXERS: dict[str, type[Mixer]] = {
    cls.kind: cls for cls in (AttentionConfig, GatedDeltaConfig, Mamba1Config, Mamba2Config)
}
