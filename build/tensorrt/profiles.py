"""Optimization profiles: the range of every symbolic dimension, for steps with prefill and steps of decode alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybridtrt.build.engine import BuildConfig
from hybridtrt.build.tensorrt.bindings import Bindings
from hybridtrt.converters.memory import MemoryPlan

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")  # in the order of the profiles of an engine
LARGEST_VOLUME = (1 << 31) - 1  # elements of a tensor that every release of TensorRT takes


@dataclass(frozen=True)
class DimRange:
    """Least, most frequent and greatest size of a dimension."""

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.usual <= self.most:
            raise ValueError(f"{self.least} <= {self.usual} <= {self.most} does not hold")


def dim_ranges(build: BuildConfig, pools: MemoryPlan, bindings: Bindings, phase: Phase) -> dict[str, DimRange]:
    """The range of each symbol of the bindings.

    A decode step has at most `max_batch_size` tokens, one a row, a step with prefill up to `max_num_tokens`, of which
    `max_logits_rows` may want logits. A step without logits asks for those of one row. Pools are usually as large as
    `pools` says. They may have up to 2^31 elements, or more where `pools` has more, which TensorRT-RTX 1.7 takes.
    """
    rows = build.max_batch_size
    tokens = rows if phase == "decode" else build.max_num_tokens
    ranges = {
        "T": DimRange(1, tokens, tokens),
        "B": DimRange(1, rows, rows),
        "B+1": DimRange(2, rows + 1, rows + 1),
        "R": DimRange(1, rows, rows if phase == "decode" else build.max_logits_rows),
    }
    for group, pool in pools.groups.items():
        table = -(-build.max_seq_len // build.tokens_per_block)
        ranges[f"P.{group}"] = DimRange(1, table, table)
        ranges[f"pages.{group}"] = _pool(bindings, f"pages.{group}", pool.num_pages)
    ranges["slots"] = _pool(bindings, "slots", pools.num_slots)
    return ranges


def shape_ranges(
    bindings: Bindings, ranges: Mapping[str, DimRange]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Least, usual and greatest shape of each input that has a symbolic dimension."""
    found = {}
    for name, spec in {**bindings.step, **bindings.caches}.items():
        dims = [ranges[dim] if isinstance(dim, str) else DimRange(dim, dim, dim) for dim in spec.shape]
        least, usual, most = ([getattr(dim, size) for dim in dims] for size in ("least", "usual", "most"))
        found[name] = tuple(least), tuple(usual), tuple(most)
    return found


def _pool(bindings: Bindings, symbol: str, usual: int) -> DimRange:
    rows = [math.prod(map(int, spec.shape[1:])) for spec in bindings.caches.values() if spec.shape[0] == symbol]
    return DimRange(1, usual, max(usual, min((LARGEST_VOLUME // size for size in rows), default=usual)))
