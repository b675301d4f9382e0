"""The second, bounded place for what preempted sequences keep; on a GPU it is host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Swapped:
    """What one sequence had in the pools when it was preempted.

    Of its `tokens` tokens `pages` and `slots` are where it was, `starts` the first page of each group that it still
    held. `data` is the runner's copy once it is made.
    """

    tokens: int
    pages: dict[str, list[int]]
    slots: list[int]
    starts: list[int]
    num_bytes: int
    data: Any = None


class SwapSpace:
    """Accounts for the bytes of swapped sequences."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"swap_bytes={capacity} is negative")
        self.capacity = capacity
        self.used = 0

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes are left."""
        return self.used + num_bytes <= self.capacity

    def add(self, swapped: Swapped) -> None:
        self.used += swapped.num_bytes

    def remove(self, swapped: Swapped) -> None:
        self.used -= swapped.num_bytes
