"""A runner that costs next to nothing, with page groups of full attention and a window, and a state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.runner import RunnerInfo

VOCAB, PAGE = 1000, 32


class ConstantRunner:
    """A runner without caches or computation: pages for `cached_tokens`, or for all sequences at their full length.

    Its best token moves on with the position, so that texts vary.
    """

    def __init__(self, sequences: int, length: int, max_num_tokens: int, cached_tokens: int | None = None) -> None:
        pages = 1 + -(-(sequences * length if cached_tokens is None else cached_tokens) // PAGE)
        self.info = RunnerInfo(
            vocab_size=VOCAB,
            max_batch_size=sequences,
            max_num_tokens=max_num_tokens,
            max_logits_rows=max_num_tokens,
            max_seq_len=length,
            page_size=PAGE,
            num_pages={"full": pages, "window": pages},
            num_slots=2 * sequences + 1,
            caches=(
                PageSpec("layers.0.kv", "full", (64,)),
                PageSpec("layers.1.kv", "window", (64,), window=128),
                StateSpec("layers.2.state", (64,)),
            ),
        )
        self.seconds = 0.0
        rng = np.random.default_rng(0)
        self._logits = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        started = time.thread_time()
        logits: NDArray[np.float32] = self._logits[batch.positions[batch.logits_indices] % VOCAB]
        self.seconds += time.thread_time() - started
        return logits

    def clear_slots(self, slots: Sequence[int]) -> None: ...

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None: ...

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None: ...

    def restore(self, saved: Any, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None: ...

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None: ...

    def close(self) -> None: ...
