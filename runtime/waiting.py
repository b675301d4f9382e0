"""The queue of sequences that wait to run."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from hybridtrt.runtime.sequence import Rank, Sequence


class WaitingQueue:
    """Ordered by rank; adding and removing take logarithmic time."""

    def __init__(self) -> None:
        self._heap: list[Rank] = []  # with those of sequences that have left
        self._live: dict[Rank, Sequence] = {}  # ranks differ between sequences

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.rank in self._live

    def add(self, sequence: Sequence) -> None:
        self._live[sequence.rank] = sequence
        heappush(self._heap, sequence.rank)

    def first(self) -> Sequence:
        """The sequence that goes next."""
        while self._heap[0] not in self._live:
            heappop(self._heap)
        return self._live[self._heap[0]]

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever it stands; false when it is not there."""
        return self._live.pop(sequence.rank, None) is not None
