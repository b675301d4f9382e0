"""A transformer block whose weights several layers use (Zamba)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.mixers.attention import AttentionConfig
from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import PageSpec


@dataclass(frozen=True)
class SharedTransformerConfig:
    """out(mlp(norm(attention(norm([x, embeddings]))))), without residuals (arXiv 2405.16712, 2411.15242).

    Norms, attention and mlp are those of the shared block of number `block`; `out`, the low-rank adapters and the
    caches are the layer's own. All layers that use one block have equal configs.
    """

    block: int
    attention: AttentionConfig
    mlp: MlpConfig
    attention_adapter_rank: int = 0  # of each of q, k and v; 0: no adapters
    mlp_adapter_rank: int = 0

    kind: ClassVar[str] = "shared_transformer"

    @property
    def rope(self) -> int | None:
        """The rotary table of the attention."""
        return self.attention.rope

    @property
    def shared_prefix(self) -> str:
        return f"shared.{self.block}"

    def weights(self, hidden: int) -> WeightTable:
        """What each use has of its own. The q, k and v adapters are one, its second factor block-diagonal."""
        table = {"out.weight": matrix(hidden, hidden)}
        shared = self.shared_weights(hidden)
        for name, rank in (("attention.qkv", 3 * self.attention_adapter_rank), ("mlp.gate_up", self.mlp_adapter_rank)):
            if rank:
                rows, columns = shared[f"{self.shared_prefix}.{name}.weight"].shape
                table[f"{name}.adapter_down.weight"] = matrix(rank, columns)
                table[f"{name}.adapter_up.weight"] = matrix(rows, rank)
        return table

    def shared_weights(self, hidden: int) -> WeightTable:
        """What all uses share, under full names. The attention reads twice the hidden size and returns it once."""
        attention = self.attention.weights(2 * hidden)
        attention["dense.weight"] = matrix(hidden, self.attention.num_heads * self.attention.head_dim)
        table = {"attention_norm.weight": precise(2 * hidden), "mlp_norm.weight": precise(hidden)}
        table |= {f"attention.{name}": spec for name, spec in attention.items()}
        table |= {f"mlp.{name}": spec for name, spec in self.mlp.weights(hidden).items()}
        return {f"{self.shared_prefix}.{name}": spec for name, spec in table.items()}

    def caches(self, prefix: str) -> list[PageSpec]:
        return self.attention.caches(f"{prefix}.attention")
