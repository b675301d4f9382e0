"""Attention routed by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix
from hybridtrt.plugins.caches import CacheSpec, PageSpec, StateSpec


@dataclass(frozen=True)
class LengthRoutedConfig:
    """Tokens at positions below `limit` attend by softmax, the others by linear attention over all tokens so far.

    Both read the same projections; only the softmax part turns q and k by `rope`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    limit: int
    rope: int | None = None  # index into the model's rotary tables; None: no positions

    kind: ClassVar[str] = "length_routed"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")

    def weights(self, hidden: int) -> WeightTable:
        """`qkv` rows are q, k, v."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {"qkv.weight": matrix(rows, hidden), "dense.weight": matrix(hidden, self.num_heads * self.head_dim)}

    def caches(self, prefix: str) -> list[CacheSpec]:
        """K and V of the tokens below the limit; the linear part's sums, from the first token on."""
        heads, dim = self.num_kv_heads, self.head_dim
        return [
            PageSpec(f"{prefix}.kv", f"below_{self.limit}", (2, heads, dim), limit=self.limit),
            StateSpec(f"{prefix}.state", (heads, dim, dim + 1)),
        ]
