"""A step batch as torch tensors, with the index tables that torch kernels share, each computed once a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.plugins.step import STEP_INPUTS, StepBatch


@dataclass(frozen=True)
class Chunks:
    """The rows of more than some number of tokens, cut into chunks of at most `size` tokens: `N` chunks of `P` rows.

    `waves[j]` pairs the rows that have a j-th chunk with the numbers of those chunks: state passes from wave to wave,
    everything inside a chunk runs over all chunks at once.
    """

    size: int
    rows: Tensor  # [P] row numbers
    index: Tensor  # [N, size] token numbers; T (one past the last) where there is no token
    valid: Tensor  # [N, size]
    waves: list[tuple[Tensor, Tensor]]  # (positions in `rows`, chunk numbers)

    def gather(self, x: Tensor) -> Tensor:
        """`[T, ...]` to `[N, size, ...]`, zero where there is no token."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.index]

    def scatter(self, chunks: Tensor, out: Tensor) -> None:
        """Write `[N, size, ...]` back to the tokens of `out` `[T, ...]`."""
        out[self.index[self.valid]] = chunks[self.valid]


class Step:
    """One step as torch kernels see it. The tensors are the arrays of `StepBatch`, which may be tensors, as int64."""

    def __init__(self, batch: StepBatch) -> None:
        self.num_tokens = batch.num_tokens
        self.num_sequences = batch.num_sequences
        self.input_ids = torch.as_tensor(batch.input_ids).long()
        self.positions = torch.as_tensor(batch.positions).long()
        self.cu_seqlens = torch.as_tensor(batch.cu_seqlens).long()
        self.context_lens = torch.as_tensor(batch.context_lens).long()
        self.state_src = torch.as_tensor(batch.state_src).long()
        self.state_dst = torch.as_tensor(batch.state_dst).long()
        self.token_slots = None if batch.token_slots is None else torch.as_tensor(batch.token_slots).long()
        self.logits_indices = torch.as_tensor(batch.logits_indices).long()
        self.block_tables = {group: torch.as_tensor(table).long() for group, table in batch.block_tables.items()}
        self._chunks: dict[tuple[int, int], Chunks | None] = {}
        self._below: dict[int, tuple[Tensor, Step]] = {}

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each row in this step, `[B]`."""
        return self.cu_seqlens.diff()

    @cached_property
    def token_rows(self) -> Tensor:
        """The row of each token, `[T]`."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @cached_property
    def real_tokens(self) -> Tensor:
        """Whether each token's row has a slot or a page, `[T]`: padding has none. Where no row has, all are real."""
        held = self.state_dst != 0
        for table in self.block_tables.values():
            held = held | (table != 0).any(1)
        return (held if held.any() else ~held)[self.token_rows]

    @cached_property
    def single_rows(self) -> Tensor:
        """Rows of one token: decode tokens, and prefill chunks that happen to be that short."""
        return torch.nonzero(self.lengths == 1).flatten()

    @cached_property
    def single_tokens(self) -> Tensor:
        """The token of each of `single_rows`."""
        return self.cu_seqlens[self.single_rows]

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Every row with its tokens, one after another; the reference kernels' order."""
        bounds = self.cu_seqlens.tolist()
        for row, (start, end) in enumerate(pairwise(bounds)):
            yield row, slice(start, end)

    def chunks(self, size: int, above: int = 1) -> Chunks | None:
        """Chunks of at most `size` tokens of all rows of more than `above` tokens; None if there is no such row."""
        if (size, above) not in self._chunks:
            self._chunks[size, above] = self._cut(size, above)
        return self._chunks[size, above]

    def below(self, limit: int) -> tuple[Tensor, Step]:
        """The tokens at positions below `limit`, and a step of these alone, with the same rows and no logits."""
        if limit not in self._below:
            tokens = torch.nonzero(self.positions < limit).flatten()
            lengths = torch.minimum(self.lengths, (limit - self.context_lens).clamp(min=0))
            changed: dict[str, Any] = {
                "input_ids": self.input_ids[tokens],
                "positions": self.positions[tokens],
                "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)),
                "logits_indices": tokens[:0],
            }
            kept = {name: getattr(self, name) for name in STEP_INPUTS if name not in changed}
            self._below[limit] = tokens, Step(StepBatch(**changed, **kept))
        return self._below[limit]

    def _cut(self, size: int, above: int) -> Chunks | None:
        rows = torch.nonzero(self.lengths > above).flatten()
        if not len(rows):
            return None
        lengths = self.lengths[rows]
        size = min(size, 1 << (int(lengths.max()) - 1).bit_length())  # short chunks are not padded to the full size
        counts = (lengths + size - 1) // size
        owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
        first = counts.cumsum(0) - counts
        number = torch.arange(int(counts.sum())) - first[owner]
        offset = number[:, None] * size + torch.arange(size)
        valid = offset < lengths[owner][:, None]
        index = torch.where(valid, self.cu_seqlens[rows][owner][:, None] + offset, self.num_tokens)
        waves = []
        for wave in range(int(counts.max())):
            active = torch.nonzero(counts > wave).flatten()
            waves.append((active, first[active] + wave))
        return Chunks(size, rows, index, valid, waves)
