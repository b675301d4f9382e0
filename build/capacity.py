"""How many tokens of a step the experts of a model take, and what becomes of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridtrt.converters.ffns import MoeConfig
from hybridtrt.plugins.capacity import OVERFLOWS


@dataclass(frozen=True)
class Capacity:
    """An expert takes ceil(`factor` * tokens * top_k / experts) of a step's tokens.

    A token that finds no place goes on without that expert ("drop"), or to the next expert of its router's order that
    has one ("next_best").
    """

    factor: float
    overflow: str = "drop"

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"moe_capacity_factor={self.factor} is not a positive number")
        if self.overflow not in OVERFLOWS:
            raise ValueError(f"moe_overflow={self.overflow!r} is not one of {', '.join(OVERFLOWS)}")

    def num_ranked(self, moe: MoeConfig) -> int:
        """How many experts of a token the router must put in order: its choices, or all that it may choose."""
        router = moe.router
        if self.overflow == "drop":
            return moe.top_k
        return moe.num_classes // router.num_groups * (router.top_groups if router.num_groups > 1 else 1)
