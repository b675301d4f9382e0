"""The gated delta rule (Gated DeltaNet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated delta rule (Gated DeltaNet, arXiv 2412.06464) behind a causal convolution."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    beta_scale: float = 1.0  # 2: the state's eigenvalues may be negative (arXiv 2411.12537)
    norm_eps: float | None = None  # of the gated norm; None: the model's

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
