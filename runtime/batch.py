"""From the scheduler's plan to the arrays of one step."""

from __future__ import annotations

import numpy as np

from hybridtrt.plugins.step import Int32, StepBatch
from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.scheduler import Plan
from hybridtrt.runtime.sequence import Sequence


class BlockTable:
    """Pages of one group by slot, `[slots, pages of the longest sequence]`, filled up with page 0.

    Only pages that were handed out since the last step are written.
    """

    def __init__(self, group: str, num_slots: int, max_pages: int) -> None:
        self.group = group
        self._table = np.zeros((num_slots, max_pages), np.int32)
        self._filled = [(0, 0)] * num_slots  # generation of the owner, pages written

    def update(self, sequence: Sequence) -> int:
        """Bring the row of a sequence up to date and return its number of pages."""
        pages = sequence.pages[self.group]
        generation, filled = self._filled[sequence.slot]
        if generation == sequence.generation and filled == len(pages):
            return filled
        if generation != sequence.generation:
            self._table[sequence.slot, :filled] = 0
            filled = 0
        self._table[sequence.slot, filled : len(pages)] = pages[filled:]
        self._filled[sequence.slot] = (sequence.generation, len(pages))
        return len(pages)

    def rows(self, slots: Int32, width: int) -> Int32:
        """The block table `[B, width]` of these slots."""
        return self._table[slots, :width]


class BatchBuilder:
    """Builds the `StepBatch` of a plan. Row `b` is `plan.sequences[b]`; decode rows come first as planned."""

    def __init__(self, caches: CacheManager, max_seq_len: int) -> None:
        self._tables = [
            BlockTable(pool.group, caches.slots.num_slots, pool.pages_for(max_seq_len)) for pool in caches.pools
        ]

    def build(self, plan: Plan) -> StepBatch:
        """Arrays of one step; only rows whose chunk reaches the end of what is known ask for logits."""
        sequences = plan.sequences
        counts = np.array(plan.counts, np.int32)
        context = np.array([sequence.computed for sequence in sequences], np.int32)
        totals = np.array([sequence.total for sequence in sequences], np.int32)
        slots = np.array([sequence.slot for sequence in sequences], np.int32)
        cu_seqlens = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(context - cu_seqlens[:-1], counts)
        return StepBatch(
            input_ids=_input_ids(plan, cu_seqlens),
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context,
            state_src=slots,
            state_dst=slots,
            logits_indices=(cu_seqlens[1:] - 1)[context + counts == totals],
            block_tables={
                table.group: table.rows(slots, max(table.update(sequence) for sequence in sequences))
                for table in self._tables
            },
        )


def _input_ids(plan: Plan, cu_seqlens: Int32) -> Int32:
    ids = np.empty(cu_seqlens[-1], np.int32)
    ids[: plan.decodes] = [sequence.output_ids[-1] for sequence in plan.sequences[: plan.decodes]]
    for row in range(plan.decodes, len(plan.sequences)):
        ids[cu_seqlens[row] : cu_seqlens[row + 1]] = plan.sequences[row].pending(plan.counts[row])
    return ids
