"""What runs one step. The torch walkers, the C++ executor and the TensorRT runner all stand behind `Runner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.caches import CacheSpec
from hybridtrt.plugins.step import StepBatch


@dataclass(frozen=True)
class RunnerInfo:
    """What the scheduler must know of a loaded engine.

    `num_pages` counts the pages of each page group and `num_slots` the state slots, both with the reserved number 0.
    """

    vocab_size: int
    max_batch_size: int  # sequences in one step
    max_num_tokens: int  # tokens in one step
    max_seq_len: int  # prompt and output tokens of one sequence
    page_size: int  # tokens a page
    num_pages: Mapping[str, int]
    num_slots: int
    caches: tuple[CacheSpec, ...]
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None


class Runner(Protocol):
    """Holds weights and cache pools, and computes one ragged step after another."""

    @property
    def info(self) -> RunnerInfo:
        """Limits and pool sizes."""

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero these slots in every state pool: a slot is zero when a sequence takes it."""

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Overwrite freed pages (by group) and slots with NaN; tests use it to prove that nothing reads them."""

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step, update the caches in place and return logits `[R, vocab_size]`."""

    def close(self) -> None:
        """Release memory and threads."""
