"""Times tactics against each other on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridtrt.build.tactics import Machine, Product
from hybridtrt.plugins.linear.panel_layout import packed_bytes
from hybridtrt.plugins.native.library import TACTIC_RANGES, Node, Operand, Program, Weight
from hybridtrt.plugins.native.tactics import DEFAULT, known_tactics
from hybridtrt.plugins.step import StepBatch

STREAM_BYTES = 1 << 28  # of the engine's file are gone through
ALIGNMENT, PAGE_BYTES = 64, 4096
FEWEST_ROUNDS, MOST_ROUNDS = 6, 16
GAIN = 0.02  # what another tactic must save to be taken
NOISE = 0.1  # of the shortest times: on a machine with less to do they lie closer

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    """Which tactic is the fastest for a product of a range of rows?"""

    product: Product
    rows: int  # the range, by its number


class Stream:
    """An engine's bytes, mapped as in a run. Products take their weights one after another, whatever is there.

    So they are as cold as those of a step, which goes through the whole engine, too.
    """

    def __init__(self, file: Path) -> None:
        self._data = np.memmap(file, np.uint8, "r")[:STREAM_BYTES]
        self._next = 0

    @property
    def scale(self) -> int:
        """Its length in MB, to the next power of two."""
        return 1 << ((self._data.size - 1) >> 20).bit_length()

    def touch(self) -> None:
        """Map it now."""
        self._data[::PAGE_BYTES].max()

    def take(self, size: int) -> NDArray[np.uint8]:
        """The next bytes."""
        if self._next + size > self._data.size:
            self._next = 0
        begin = self._next
        self._next += -(-size // ALIGNMENT) * ALIGNMENT
        return self._data[begin : begin + size]


def fastest(question: Question, stream: Stream, machine: Machine, seconds: float) -> str | None:
    """The fastest tactic, or None where so many seconds or so busy a machine do not tell."""
    tactics = known_tactics().worth_trying[question.rows]
    once = measure(question, tactics, 1, stream, machine).sum()
    rounds = min(MOST_ROUNDS, int((seconds - once) / (once * (1 + 2 / len(tactics)))))
    if rounds < FEWEST_ROUNDS:
        return None
    best = tactics[int(measure(question, tactics, rounds, stream, machine).min(axis=0).argmin())]
    if best == DEFAULT:
        return best
    better = is_faster(measure(question, (DEFAULT, best), rounds, stream, machine))
    return None if better is None else best if better else DEFAULT


def is_faster(times: Times) -> bool | None:
    """Of times `[rounds, 2]`: whether the second saves `GAIN` and more than what the first differs from itself.

    Other work only adds to a time, so the shortest ones count: of the first rounds and of the last. None where they
    are too far apart to tell.
    """
    halves = np.stack([half.min(axis=0) for half in np.array_split(times, 2)])
    low, high = halves.min(axis=0), halves.max(axis=0)
    if (high > (1 + NOISE) * low).any():
        return None
    return bool(high[1] < (1 - GAIN) * low[0])


def measure(question: Question, tactics: Sequence[str], rounds: int, stream: Stream, machine: Machine) -> Times:
    """Seconds `[rounds, tactics]` of products one after another, A B C C B A and so on, each with other weights."""
    product, rows = question.product, known_tactics().typical_rows[question.rows]
    size = packed_bytes((product.n, product.k), product.format, product.group)
    x, y = np.ones((rows, product.k), np.float32), np.empty((rows, product.n), np.float32)
    windows = [Operand("external_T", array.ctypes.data, 0, array.shape[1], (array.shape[1],)) for array in (x, y)]

    def node(tactic: str) -> Node:
        chosen = (known_tactics().names.index(tactic),) * TACTIC_RANGES
        weight = Weight(stream.take(size), product.format, (product.n, product.k), product.group, chosen)
        return Node("linear", (windows[0],), (windows[1],), (weight, None), (), ())

    order = [range(len(tactics))[:: -1 if turn % 2 else 1] for turn in range(rounds)]
    nodes = [node(tactics[0]), *(node(tactics[i]) for turn in order for i in turn)]  # the first wakes the threads
    program = Program(nodes, 0, 0, (), machine.threads, machine.isa)
    program.profile(True)
    program.step(_tokens(rows), 1)
    taken = program.times()[1:].reshape(rounds, -1) / 1e9
    program.close()
    return np.stack([row[list(turn)] for row, turn in zip(taken, order, strict=True)])


def _tokens(rows: int) -> StepBatch:
    """A step of one sequence of so many tokens."""
    tokens, one, none = np.zeros(rows, np.int32), np.ones(1, np.int32), np.zeros(0, np.int32)
    ends = np.array([0, rows], np.int32)
    return StepBatch(tokens, np.arange(rows, dtype=np.int32), ends, 0 * one, one, one, none, {})
