"""What every token changes of the sequences that run, in arrays by row: a step changes it for all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybridtrt.plugins.step import Int32

if TYPE_CHECKING:
    from hybridtrt.runtime.sequence import Sequence


class Numbers(NamedTuple):
    """The numbers of some rows, `[N]` each."""

    computed: Int32  # tokens in the caches
    total: Int32  # prompt and output tokens, 0 before the first output
    most: Int32  # of them
    last: Int32  # the newest output token
    room: Int32  # tokens up to which nothing must be asked of the caches
    source: Int32  # the slot whose states the next step reads
    target: Int32  # and the one that it writes, mostly the same
    source_generation: Int32
    target_generation: Int32
    plain: Int32  # `Sequence.plain`


NO_NUMBERS = Numbers(*np.zeros((len(Numbers._fields), 0), np.int32))


class Rows:
    """A sequence has a row, the one of its block tables, as long as it runs."""

    def __init__(self, num_rows: int) -> None:
        self._all = np.zeros((len(Numbers._fields), num_rows), np.int32)
        self.numbers = Numbers(*self._all)  # views, to be changed
        self.free = list(range(num_rows - 1, -1, -1))

    def enter(self, sequence: Sequence, computed: int) -> None:
        """Give a row to a sequence of which so many tokens are in the caches."""
        row = self.free.pop()
        sequence.rows, sequence.row = self, row
        self._all[:, row] = 0
        self.numbers.computed[row] = computed
        self.numbers.most[row], self.numbers.plain[row] = sequence.max_total, sequence.plain
        if sequence.output_ids:
            self.set_output(sequence)

    def set_output(self, sequence: Sequence) -> None:
        """A sequence has a new output token."""
        self.numbers.total[sequence.row], self.numbers.last[sequence.row] = sequence.total, sequence.output_ids[-1]

    def append(self, rows: Int32, now: Numbers, tokens: list[int]) -> list[bool]:
        """Each of some rows `[N]` has a new output token; returns which ones have as many as they may have."""
        total = now.total + 1
        self.numbers.total[rows], self.numbers.last[rows] = total, tokens
        full: list[bool] = (total >= now.most).tolist()
        return full

    def leave(self, sequence: Sequence) -> None:
        """Take the row back."""
        self.free.append(sequence.row)
        sequence.rows, sequence.row = None, -1

    def take(self, rows: Int32) -> Numbers:
        """A copy of the numbers of these rows."""
        return Numbers(*self._all.take(rows, axis=1))

    def faults(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong with the accounts, one line a fault."""
        running = list(running)
        rows = sorted([*self.free, *(sequence.row for sequence in running)])
        if rows != list(range(len(self.numbers.total))):
            return [f"the rows of block tables are damaged: {rows}"]
        total = self.numbers.total
        return [
            f"row {sequence.row} has {total[sequence.row]} tokens, {sequence.name!r} has {sequence.total}"
            for sequence in running
            if sequence.output_ids and total[sequence.row] != sequence.total
        ]
