"""Shape and storage rule of one canonical weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightSpec:
    """`full_precision` weights (norms, routers, convolutions, A and dt) are stored in float32 whatever the dtype."""

    shape: tuple[int, ...]
    full_precision: bool = False


WeightTable = dict[str, WeightSpec]


def matrix(*shape: int) -> WeightSpec:
    """A weight stored in the checkpoint's dtype."""
    return WeightSpec(shape)


def precise(*shape: int) -> WeightSpec:
    """A small or sensitive weight, always stored in float32."""
    return WeightSpec(shape, full_precision=True)
