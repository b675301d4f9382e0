"""Cuts sequences into ragged steps with scattered pages and slots, for operator and runner tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridtrt.plugins.step import StepBatch


@dataclass
class Placement:
    """Where each sequence lives: its slot and its pages, all shuffled; number 0 is never used."""

    slots: list[int]
    pages: list[list[int]]
    num_slots: int
    num_pages: int


def place(lengths: Sequence[int], page_size: int, rng: np.random.Generator) -> Placement:
    """Hand every sequence a slot and pages in random order, with a few unused ones between."""
    num_slots = len(lengths) + 3
    slots = rng.permutation(np.arange(1, num_slots))[: len(lengths)].tolist()
    needed = [-(-length // page_size) for length in lengths]
    num_pages = sum(needed) + 4
    shuffled = rng.permutation(np.arange(1, num_pages)).tolist()
    pages = []
    for count in needed:
        pages.append(shuffled[:count])
        shuffled = shuffled[count:]
    return Placement(slots, pages, num_slots, num_pages)


def make_batch(
    rows: Sequence[tuple[int, int, int]],  # sequence, first token, one past the last token
    tokens: Sequence[Sequence[int]],
    placement: Placement,
    groups: Sequence[str] = (),
) -> StepBatch:
    """One step over pieces of some sequences; every token wants logits."""
    width = max((len(placement.pages[sequence]) for sequence, _, _ in rows), default=0) + 1
    table = np.zeros((len(rows), width), np.int32)
    for row, (sequence, _, _) in enumerate(rows):
        table[row, : len(placement.pages[sequence])] = placement.pages[sequence]
    lengths = [end - start for _, start, end in rows]
    slots = np.array([placement.slots[sequence] for sequence, _, _ in rows], np.int32)
    return StepBatch(
        input_ids=np.array([tokens[s][t] for s, a, b in rows for t in range(a, b)], np.int32),
        positions=np.array([t for _, a, b in rows for t in range(a, b)], np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array([a for _, a, _ in rows], np.int32),
        state_src=slots,
        state_dst=slots.copy(),
        logits_indices=np.arange(sum(lengths), dtype=np.int32),
        block_tables=dict.fromkeys(groups, table),
    )


def cut(lengths: Sequence[int], chunk: int, rng: np.random.Generator) -> Iterator[list[tuple[int, int, int]]]:
    """Steps that run every sequence to its end: random rows in random order, pieces of 1..chunk tokens."""
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        open_rows = [s for s in rng.permutation(len(lengths)).tolist() if done[s] < lengths[s]]
        rows = []
        for sequence in open_rows[: rng.integers(1, len(open_rows) + 1)]:
            end = min(lengths[sequence], done[sequence] + int(rng.integers(1, chunk + 1)))
            rows.append((sequence, done[sequence], end))
            done[sequence] = end
        yield rows
