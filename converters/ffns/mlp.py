"""The dense feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise


@dataclass(frozen=True)
class MlpConfig:
    """Gated MLP: down(act(gate x) * up x); not gated: down(act(up x))."""

    intermediate: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False  # of all projections
    gate_multiplier: float = 1.0  # of the gate before its activation
    down_multiplier: float = 1.0  # of the output

    kind: ClassVar[str] = "mlp"

    def weights(self, hidden: int) -> WeightTable:
        """`gate_up` rows are gate, up; without a gate `up` takes its place."""
        up, rows = ("gate_up", 2 * self.intermediate) if self.gated else ("up", self.intermediate)
        table = {f"{up}.weight": matrix(rows, hidden), "down.weight": matrix(hidden, self.intermediate)}
        if self.bias:
            table |= {f"{up}.bias": precise(rows), "down.bias": precise(hidden)}
        return table
