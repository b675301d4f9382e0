"""What every token changes of the sequences that run, in arrays by row: a step changes it for all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.step import Int32

if TYPE_CHECKING:
    from hybridtrt.runtime.sequence import Sequence

Indices = NDArray[np.intp]  # numpy takes numbers of other kinds several times slower


class Numbers(NamedTuple):
    """The numbers of some rows, `[N]` each."""

    computed: Int32  # tokens in the caches
    max_cached: Int32  # of them
    pending: Int32  # sampled tokens that are not among them, 0 before the first
    last: Int32  # the newest sampled token
    room: Int32  # tokens up to which nothing must be asked of the caches
    source: Int32  # the slot whose states the next step reads
    target: Int32  # and the one that it writes, mostly the same
    source_generation: Int32
    target_generation: Int32
    plain: Int32  # `Sequence.plain`
    direct: Int32  # `Sequence.direct`


_COMPUTED, _LAST = map(Numbers._fields.index, ("computed", "last"))
NO_ROWS: Indices = np.zeros(0, np.intp)
NO_NUMBERS = Numbers(*np.zeros((len(Numbers._fields), 0), np.int32))


class Rows:
    """A sequence has a row, the one of its block tables, as long as it runs."""

    def __init__(self, num_rows: int) -> None:
        self._all = np.zeros((len(Numbers._fields), num_rows), np.int32)
        self.numbers = Numbers(*self._all)  # views, to change many rows
        self.cells = self._all.data  # one number, [field, row]: several times faster than an array's
        self.free = list(range(num_rows - 1, -1, -1))

    def enter(self, sequence: Sequence, computed: int) -> None:
        """Give a row to a sequence of which so many tokens are in the caches."""
        row = self.free.pop()
        self._all[:, row] = 0
        self.numbers.max_cached[row] = sequence.max_cached
        self.numbers.plain[row], self.numbers.direct[row] = sequence.plain, sequence.direct
        sequence.rows, sequence.row = self, row
        sequence.computed = computed
        if sequence.output_ids:
            self.numbers.last[row] = sequence.output_ids[-1]

    def leave(self, sequence: Sequence) -> None:
        """Take the row back."""
        self.free.append(sequence.row)
        sequence.rows, sequence.row = None, -1

    def take(self, rows: Indices) -> Numbers:
        """A copy of the numbers of these rows."""
        return Numbers(*self._all.take(rows, axis=1))

    def advance(self, rows: Indices, computed: Int32, last: NDArray[np.int64]) -> None:
        """Each of some rows has run its last token `[N]`, has `computed` tokens now and has sampled another `last`."""
        self.numbers.computed[rows], self.numbers.last[rows] = computed, last

    def advance_one(self, row: int, computed: int, last: int) -> None:
        """`advance` of one row."""
        self.cells[_COMPUTED, row], self.cells[_LAST, row] = computed, last

    def faults(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong with the accounts, one line a fault."""
        running = list(running)
        rows = sorted([*self.free, *(sequence.row for sequence in running)])
        if rows != list(range(len(self.numbers.computed))):
            return [f"the rows of block tables are damaged: {rows}"]
        return [
            f"row {sequence.row} has {self.numbers.pending[sequence.row]} tokens to run, {sequence.name!r} has {left}"
            for sequence in running
            if sequence.output_ids
            if self.numbers.pending[sequence.row] != (left := sequence.total - sequence.computed)
        ]
