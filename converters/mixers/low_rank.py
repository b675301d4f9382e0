"""Attention over keys and values of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix
from hybridtrt.plugins.caches import CacheSpec, StateSpec


@dataclass(frozen=True)
class LowRankConfig:
    """Softmax attention over `rank` rows to which every token adds its key and value, weighted by its position's row
    of a learned table (after Linformer, arXiv 2006.04768): what a sequence keeps does not grow with its length.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rank: int
    positions: int  # rows of the table
    rope: int | None = None  # index into the model's rotary tables; None: no positions but the table's

    kind: ClassVar[str] = "low_rank"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")

    def weights(self, hidden: int) -> WeightTable:
        """`qkv` rows are q, k, v; `projection` has a row a position."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {
            "qkv.weight": matrix(rows, hidden),
            "projection": matrix(self.positions, self.rank),
            "dense.weight": matrix(hidden, self.num_heads * self.head_dim),
        }

    def caches(self, prefix: str) -> list[CacheSpec]:
        """The compressed keys, `head_dim` by `rank`, and values, `rank` by `head_dim`, of each head."""
        heads, dim = self.num_kv_heads, self.head_dim
        return [
            StateSpec(f"{prefix}.keys", (heads, dim, self.rank)),
            StateSpec(f"{prefix}.values", (heads, self.rank, dim)),
        ]
