"""The dense feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix


@dataclass(frozen=True)
class MlpConfig:
    """Gated MLP: down(act(gate x) * up x)."""

    intermediate: int
    activation: str = "silu"

    kind: ClassVar[str] = "mlp"

    def weights(self, hidden: int) -> WeightTable:
        """`gate_up` rows are gate, up."""
        return {
            "gate_up.weight": matrix(2 * self.intermediate, hidden),
            "down.weight": matrix(hidden, self.intermediate),
        }
