"""Decode batches in few shapes, so that each can be a CUDA graph: padded with rows of slot 0 and page 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridtrt.plugins.step import Int32, StepBatch


@dataclass(frozen=True)
class Bucket:
    """A shape of a decode step: rows, each of one token that wants logits, and pages of a row by page group."""

    rows: int
    pages: tuple[tuple[str, int], ...]


class DecodeBuckets:
    """Powers of two up to the largest batch and the longest block table of each group, and these themselves."""

    def __init__(self, max_batch_size: int, max_pages: dict[str, int]) -> None:
        self._max_batch_size, self._max_pages = max_batch_size, max_pages

    def of(self, batch: StepBatch) -> Bucket | None:
        """The smallest bucket that holds a batch; None if it does not only decode."""
        rows = batch.num_sequences
        if batch.num_tokens != rows or not np.array_equal(batch.logits_indices, np.arange(rows)):
            return None
        pages = {group: table.shape[1] for group, table in batch.block_tables.items()}
        return Bucket(
            _up(rows, self._max_batch_size),
            tuple((group, _up(width, self._max_pages[group])) for group, width in sorted(pages.items())),
        )

    def pad(self, batch: StepBatch, bucket: Bucket) -> StepBatch:
        """The batch with rows of padding: token 0 at position 0, which read and write slot 0 and page 0."""
        more = bucket.rows - batch.num_sequences
        numbers = np.arange(bucket.rows + 1, dtype=np.int32)

        def padded(values: Int32) -> Int32:
            return np.pad(values, (0, more))

        tables = {}
        for group, width in bucket.pages:
            table = batch.block_tables[group]
            tables[group] = np.pad(table, ((0, more), (0, width - table.shape[1])))
        return replace(
            batch,
            input_ids=padded(batch.input_ids),
            positions=padded(batch.positions),
            cu_seqlens=numbers,
            context_lens=padded(batch.context_lens),
            state_src=padded(batch.state_src),
            state_dst=padded(batch.state_dst),
            logits_indices=numbers[:-1],
            block_tables=tables,
        )


def _up(size: int, most: int) -> int:
    """The least power of two that is not below `size`, or `most` if that is less."""
    return min(1 << max(size - 1, 0).bit_length(), most)
