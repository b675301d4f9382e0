"""Causal softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import PageSpec


@dataclass(frozen=True)
class AttentionConfig:
    """Causal softmax attention with grouped key/value heads (GQA) over a paged cache.

    A multiplier of the keys belongs into `scale`. `qk_norm` is an RMSNorm of each q and k head, or of the whole
    projections. `sinks` adds to each head's softmax a score that no value goes with.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False  # of the q, k and v projections
    dense_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    output_gate: bool = False  # sigmoid gate from the query projection, on the attention output
    head_gate: bool = False  # sigmoid gate of each head from a projection of its own
    rope: int | None = None  # index into the model's rotary tables; None: no positions
    window: int | None = None  # tokens that can be attended, the current one included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False

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
        if self.qk_norm != "none":
            whole = self.qk_norm == "full"
            table["q_norm.weight"] = precise(q if whole else self.head_dim)
            table["k_norm.weight"] = precise(kv if whole else self.head_dim)
        if self.head_gate:
            table["head_gate.weight"] = matrix(self.num_heads, hidden)
        if self.sinks:
            table["sinks"] = precise(self.num_heads)
        return table

    def caches(self, prefix: str) -> list[PageSpec]:
        """K and V of one token: `[2, num_kv_heads, head_dim]`."""
        group = "full_attention" if self.window is None else f"window_{self.window}"
        return [PageSpec(f"{prefix}.kv", group, (2, self.num_kv_heads, self.head_dim), window=self.window)]
