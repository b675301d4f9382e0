"""Mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.ffns.router import RouterConfig
from hybridtrt.converters.weights import WeightTable, matrix, precise


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of gated-MLP experts, with an optional shared expert that every token passes."""

    num_experts: int
    top_k: int
    intermediate: int
    router: RouterConfig
    activation: str = "silu"
    shared_intermediate: int = 0  # 0: no shared expert
    shared_gate: bool = False  # the shared expert's output is scaled by sigmoid(w x)

    kind: ClassVar[str] = "moe"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.top_k} is not in 1..{self.num_experts} (number of experts)")

    def weights(self, hidden: int) -> WeightTable:
        """`gate_up` rows are gate, up."""
        table = {
            "router.weight": precise(self.num_experts, hidden),
            "experts.gate_up": matrix(self.num_experts, 2 * self.intermediate, hidden),
            "experts.down": matrix(self.num_experts, hidden, self.intermediate),
        }
        if self.shared_intermediate:
            table["shared.gate_up.weight"] = matrix(2 * self.shared_intermediate, hidden)
            table["shared.down.weight"] = matrix(hidden, self.shared_intermediate)
            if self.shared_gate:
                table["shared_gate.weight"] = precise(1, hidden)
        return table
