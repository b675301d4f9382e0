"""Multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import PageSpec


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (MLA): keys and values of all heads from one compressed vector a token.

    A query or key head has `nope_dim` channels without positions and `rope_dim` rotary ones; the rotary part of the
    keys is one head that all share, and the queries may come from a compressed vector too.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    scale: float
    q_rank: int | None = None  # None: queries straight from the hidden state
    bias: bool = False  # of the projections to the compressed vectors
    dense_bias: bool = False
    head_gate: bool = False  # sigmoid gate of each head from a projection of its own
    rope: int | None = None  # index into the model's rotary tables; None: no positions
    norm_eps: float = 1e-6  # of the norms of the compressed vectors
    interleaved: bool = True  # rotary channels turn in neighbouring pairs in the model's files; in halves here

    kind: ClassVar[str] = "mla"

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def weights(self, hidden: int) -> WeightTable:
        """`q` (or `q_up`) rows are the channels without positions of all heads, then the rotary ones of all heads;
        `kv_down` rows the compressed vector, then the rotary key; `kv_up` rows head by head its keys, then its values.
        """
        heads, kv_rows = self.num_heads, self.kv_rank + self.rope_dim
        table: WeightTable = {}
        if self.q_rank is None:
            table["q.weight"] = matrix(heads * self.qk_dim, hidden)
        else:
            table["q_down.weight"] = matrix(self.q_rank, hidden)
            if self.bias:
                table["q_down.bias"] = precise(self.q_rank)
            table["q_norm.weight"] = precise(self.q_rank)
            table["q_up.weight"] = matrix(heads * self.qk_dim, self.q_rank)
        table["kv_down.weight"] = matrix(kv_rows, hidden)
        if self.bias:
            table["kv_down.bias"] = precise(kv_rows)
        table["kv_norm.weight"] = precise(self.kv_rank)
        table["kv_up.weight"] = matrix(heads * (self.nope_dim + self.v_dim), self.kv_rank)
        if self.head_gate:
            table["head_gate.weight"] = matrix(heads, hidden)
        table["dense.weight"] = matrix(hidden, heads * self.v_dim)
        if self.dense_bias:
            table["dense.bias"] = precise(hidden)
        return table

    def caches(self, prefix: str) -> list[PageSpec]:
        """The compressed vector and the rotary key of one token: `[kv_rank + rope_dim]`."""
        return [PageSpec(f"{prefix}.kv", "full_attention", (self.kv_rank + self.rope_dim,))]
