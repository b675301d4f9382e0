"""One sequence outside the scheduler: the logits of every token, and the steps that lead to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridtrt.converters.memory import PageGroup, cache_memory
from hybridtrt.plugins.step import Int32, StepBatch
from hybridtrt.runtime.runner import Runner, RunnerInfo


def full_logits(runner: Runner, input_ids: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
    """`[len(input_ids), vocab_size]`, prefilled in chunks of `chunk` tokens, or of as many as a step gives logits of.

    Uses slot 1 and the first pages of an idle runner. Raises `ValueError` if the sequence is longer than the engine's.
    """
    runner.clear_slots([1])
    return np.concatenate([runner.step(batch) for batch in prefill_steps(runner.info, input_ids, chunk)])


def prefill_steps(info: RunnerInfo, input_ids: Sequence[int], chunk: int | None = None) -> Iterator[StepBatch]:
    """The steps of `full_logits`; slot 1 must be zero before the first."""
    if not 1 <= len(input_ids) <= info.max_seq_len:
        raise ValueError(f"{len(input_ids)} tokens are not in 1..{info.max_seq_len} (max_seq_len of the engine)")
    chunk = min(chunk or info.max_num_tokens, info.max_num_tokens, info.max_logits_rows)
    groups = cache_memory(info.caches).groups.values()
    one = np.ones(1, np.int32)
    for start in range(0, len(input_ids), chunk):
        ids = np.asarray(input_ids[start : start + chunk], np.int32)
        yield StepBatch(
            input_ids=ids,
            positions=np.arange(start, start + len(ids), dtype=np.int32),
            cu_seqlens=np.array([0, len(ids)], np.int32),
            context_lens=np.array([start], np.int32),
            state_src=one,
            state_dst=one,
            logits_indices=np.arange(len(ids), dtype=np.int32),
            block_tables={group.name: _table(group, info, start, start + len(ids)) for group in groups},
        )


def _table(group: PageGroup, info: RunnerInfo, start: int, end: int) -> Int32:
    """The pages `[1, P]` of a step from token `start` to `end`: those of a window take turns, those before it are 0."""
    ring = group.pages(info.max_seq_len, info.page_size, info.max_num_tokens)
    pages = np.arange(-(-(end if group.limit is None else min(end, group.limit)) // info.page_size), dtype=np.int32)
    first = 0 if group.window is None else max(start - group.window + 1, 0) // info.page_size
    return np.where(pages < first, 0, 1 + pages % ring).astype(np.int32)[None]
