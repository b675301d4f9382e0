"""Causal softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, PageSpec


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
    rope: int | None = None  # index into the model's rotary tables; None: no positions
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
