"""From the scheduler's plan to the arrays of one step."""

from __future__ import annotations

import numpy as np

from hybridtrt.plugins.step import Int32, StepBatch
from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.pages import Holding, PagePool
from hybridtrt.runtime.rows import Indices
from hybridtrt.runtime.scheduler import Plan


class BlockTable:
    """Pages of one group by row, `[rows, pages of the longest sequence]`, page 0 where a sequence holds none."""

    def __init__(self, pool: PagePool, num_rows: int, max_seq_len: int) -> None:
        self.pool = pool
        self._table = np.zeros((num_rows, pool.end(max_seq_len)), np.int32)
        self._written = [(0, 0)] * num_rows  # the first page that the row holds and one past the last

    def write(self, row: int, holding: Holding, fresh: bool) -> None:
        """Bring a row up to date; `fresh`: it was another sequence's."""
        first, end = (0, 0) if fresh else self._written[row]
        table, start, pages = self._table[row], holding.start, holding.pages
        if fresh:
            table[:] = 0
        elif first < start:
            table[first:start] = 0
        begin = max(end, start)
        if begin < len(pages):
            table[begin : len(pages)] = pages[begin:]
        self._written[row] = (start, len(pages))

    def rows(self, rows: Indices, tokens: int) -> Int32:
        """The block table `[B, P]` of these rows, of which the longest has `tokens` tokens."""
        end = self.pool.end(tokens)
        return self._table[rows, :end] if len(rows) > 1 else self._table[rows.item(0)][None, :end]


class BatchBuilder:
    """Builds the `StepBatch` of a plan. Row `b` is `plan.sequences[b]`."""

    def __init__(self, caches: CacheManager, num_rows: int, max_seq_len: int) -> None:
        self._caches = caches
        self._numbers = np.arange(num_rows + 1, dtype=np.int32)
        self._tables = [BlockTable(pool, num_rows, max_seq_len) for pool in caches.pools]

    def build(self, plan: Plan) -> StepBatch:
        """Arrays of one step; row `b` asks for the logits of its last `plan.logits[b]` tokens."""
        self._update_tables()
        return self._decode(plan) if plan.singles == len(plan.sequences) else self._mixed(plan)

    def _decode(self, plan: Plan) -> StepBatch:
        """Where every row runs one token, as in most steps, little has to be computed."""
        now = plan.now
        return StepBatch(
            input_ids=now.last,
            positions=now.computed,
            cu_seqlens=self._numbers[: plan.singles + 1],
            context_lens=now.computed,
            logits_indices=self._numbers[: plan.singles],
            state_src=now.source,
            state_dst=now.target,
            block_tables=self._block_tables(plan.rows, now.computed.item(now.computed.argmax()) + 1),
        )

    def _mixed(self, plan: Plan) -> StepBatch:
        others = [sequence.row for sequence in plan.sequences[plan.singles :]]
        rows = np.concatenate([plan.rows, others], dtype=np.intp)
        now = self._caches.rows.take(rows)
        context = now.computed
        counts = _counts(plan.counts, plan.singles)
        cu_seqlens = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(context - cu_seqlens[:-1], counts)
        return StepBatch(
            input_ids=_input_ids(plan, int(cu_seqlens[-1])),
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context,
            logits_indices=_logits_indices(_counts(plan.logits, plan.singles), cu_seqlens[1:]),
            state_src=now.source,
            state_dst=now.target,
            block_tables=self._block_tables(rows, int((context + counts).max())),
        )

    def _block_tables(self, rows: Indices, longest: int) -> dict[str, Int32]:
        """The pages of rows, the longest of which will have so many tokens, by group."""
        return {table.pool.group: table.rows(rows, longest) for table in self._tables}

    def _update_tables(self) -> None:
        for sequence, fresh in self._caches.changed:
            if sequence.running:
                for table, holding in zip(self._tables, sequence.holdings, strict=True):
                    table.write(sequence.row, holding, fresh)
        self._caches.changed.clear()


def _counts(values: list[int], singles: int) -> Int32:
    """An array of values of which the first `singles` are 1."""
    counts = np.ones(len(values), np.int32)
    counts[singles:] = values[singles:]
    return counts


def _input_ids(plan: Plan, num_tokens: int) -> Int32:
    ids = np.empty(num_tokens, np.int32)
    end = plan.singles
    ids[:end] = plan.now.last
    for sequence, count in zip(plan.sequences[plan.singles :], plan.counts[plan.singles :], strict=True):
        start, end = end, end + count
        ids[start:end] = sequence.pending(count)
    return ids


def _logits_indices(counts: Int32, ends: Int32) -> Int32:
    """The last `counts[b]` tokens of each row."""
    stops = counts.cumsum(dtype=np.int32)
    return np.asarray(np.arange(stops[-1], dtype=np.int32) + np.repeat(ends - stops, counts))
