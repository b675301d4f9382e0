"""What runs one step. The torch walkers, the C++ executor and the TensorRT runner all stand behind `Runner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.caches import CacheSpec
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.step import StepBatch


@dataclass(frozen=True)
class Costs:
    """What preempting costs: running tokens again, or copying caches away and back. Only speed depends on them."""

    seconds_per_token: float = 1e-3  # of prefill
    copy_bytes_per_s: float = 4e9


@dataclass(frozen=True)
class RunnerInfo:
    """What the scheduler must know of a loaded engine.

    `num_pages` counts the pages of each page group and `num_slots` the state slots, both with the reserved number 0.
    """

    vocab_size: int
    max_batch_size: int  # sequences in one step
    max_num_tokens: int  # tokens in one step
    max_logits_rows: int  # tokens in one step that want logits
    max_seq_len: int  # prompt and output tokens of one sequence
    page_size: int  # tokens a page
    num_pages: Mapping[str, int]
    num_slots: int
    caches: tuple[CacheSpec, ...]
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    costs: Costs = field(default_factory=Costs)


class Runner(Protocol):
    """Holds weights and cache pools, and computes one ragged step after another."""

    @property
    def info(self) -> RunnerInfo:
        """Limits and pool sizes."""

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero these slots in every state pool: a slot is zero when a sequence takes it."""

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Copy pages, (source, target) by group, in all layers of the group; no page is both."""

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Any:
        """A copy of these pages (by group) and slots outside the pools, for `restore`; on a GPU in host memory."""

    def restore(self, saved: Any, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Write a copy back to as many pages and slots, which need not be the same ones."""

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Overwrite freed pages (by group) and slots with NaN; tests use it to prove that nothing reads them."""

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step, update the caches in place and return logits `[R, vocab_size]`.

        The caller may overwrite the result. Pages before a row's window may be page 0 in its block table. `state_src`
        and `state_dst` of a row may differ, several rows may read one slot, and no row reads a slot that another one
        writes.
        """

    def close(self) -> None:
        """Release memory and threads."""


@runtime_checkable
class TracingRunner(Protocol):
    """A `Runner` that can show what it computes on the way."""

    @property
    def info(self) -> RunnerInfo:
        """Limits and pool sizes."""

    @property
    def program(self) -> Program:
        """The operator calls that it runs."""

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero these slots."""

    def trace(self, batch: StepBatch, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Run one step and return the named values of the program."""
