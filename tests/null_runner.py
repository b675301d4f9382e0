"""A runner without a network: its logits depend on every token of the history, read back through pages and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.caches import CacheSpec, PageSpec, StateSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.runner import RunnerInfo

PRIME = 2_147_483_647
FACTOR = 48_271
MIX = np.uint64(0x9E3779B97F4A7C15)


def null_info(
    vocab_size: int = 50,
    max_batch_size: int = 8,
    max_num_tokens: int = 32,
    max_seq_len: int = 64,
    page_size: int = 4,
    num_pages: Mapping[str, int] | None = None,
    num_slots: int = 9,
    states: bool = True,
    eos_token_ids: tuple[int, ...] = (),
) -> RunnerInfo:
    """Limits of a small engine with page groups "full" and "window", unless others are given, and one state pool."""
    num_pages = {"full": 65, "window": 65} if num_pages is None else num_pages
    caches: list[CacheSpec] = [PageSpec(f"layers.{i}.kv", group, (1,)) for i, group in enumerate(num_pages)]
    if states:
        caches.append(StateSpec("layers.9.state", (1,)))
    return RunnerInfo(
        vocab_size=vocab_size,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        page_size=page_size,
        num_pages=num_pages,
        num_slots=num_slots,
        caches=tuple(caches),
        eos_token_ids=eos_token_ids,
    )


class NullRunner:
    """Stores tokens in page pools and a running hash in a state pool, and checks every batch against the step contract.

    A wrong slot, page, position, order or cut, or a state that survives its owner, changes the logits. `on_step` is
    called with each batch before it runs and may raise; `nan_token` makes the logits NaN for sequences that begin with
    it.
    """

    def __init__(
        self,
        info: RunnerInfo,
        on_step: Callable[[StepBatch], None] | None = None,
        nan_token: int | None = None,
    ) -> None:
        self.info = info
        self.on_step = on_step
        self.nan_token = nan_token
        self.pages = {group: np.full((count, info.page_size), np.nan) for group, count in info.num_pages.items()}
        self.states = np.full(info.num_slots, np.nan)
        self.states[0] = 0
        self.has_states = any(isinstance(spec, StateSpec) for spec in info.caches)
        self.batches: list[StepBatch] = []
        self.closed = False

    def clear_slots(self, slots: Sequence[int]) -> None:
        assert self.has_states
        assert all(0 < slot < len(self.states) for slot in slots), slots
        self.states[list(slots)] = 0

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        assert 0 not in slots
        self.states[list(slots)] = np.nan
        for group, numbers in pages.items():
            assert 0 not in numbers
            self.pages[group][list(numbers)] = np.nan

    def close(self) -> None:
        self.closed = True

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        check_batch(batch, self.info, self.has_states)
        self.batches.append(batch)
        if self.on_step is not None:
            self.on_step(batch)
        logits = {}
        for row in range(batch.num_sequences):
            start, stop = batch.cu_seqlens[row : row + 2]
            hashes = self._run(batch, row, batch.input_ids[start:stop].astype(np.int64))
            logits[stop - 1] = self._logits(hashes, batch, row)
        rows = [logits[index] for index in batch.logits_indices]
        return np.stack(rows) if rows else np.zeros((0, self.info.vocab_size), np.float32)

    def _run(self, batch: StepBatch, row: int, tokens: NDArray[np.int64]) -> list[float]:
        hashes = []
        positions = batch.context_lens[row] + np.arange(len(tokens))
        for group, pool in self.pages.items():
            table, size = batch.block_tables[group][row], self.info.page_size
            pool[table[positions // size], positions % size] = tokens
            everything = np.arange(positions[-1] + 1)
            hashes.append(page_hash(pool[table[everything // size], everything % size]))
        if self.has_states:
            state = self.states[batch.state_src[row]]
            for token in tokens:
                state = (state * FACTOR + token + 1) % PRIME
            self.states[batch.state_dst[row]] = state
            hashes.append(state)
        return hashes

    def _logits(self, hashes: list[float], batch: StepBatch, row: int) -> NDArray[np.float32]:
        if not np.isfinite(hashes).all():
            return np.full(self.info.vocab_size, np.nan, np.float32)
        if self.nan_token is not None and self._first_token(batch, row) == self.nan_token:
            return np.full(self.info.vocab_size, np.nan, np.float32)
        return hash_logits(hashes, self.info.vocab_size)

    def _first_token(self, batch: StepBatch, row: int) -> float:
        group, pool = next(iter(self.pages.items()))
        return float(pool[batch.block_tables[group][row, 0], 0])


def page_hash(tokens: NDArray[np.float64]) -> float:
    """A hash of tokens and their places; NaN if one is NaN."""
    weights = np.arange(1, len(tokens) + 1) * 7919 % 10007
    return float((tokens + 1) @ weights % PRIME)


def hash_logits(hashes: Sequence[float], vocab_size: int) -> NDArray[np.float32]:
    """Logits `[vocab_size]` in -4..4 that change altogether with any of the hashes."""
    key = np.uint64(0)
    with np.errstate(over="ignore"):
        for value in hashes:
            key = (key ^ np.uint64(value)) * MIX
            key ^= key >> np.uint64(29)
        words = (np.arange(1, vocab_size + 1, dtype=np.uint64) ^ key) * MIX
        words = (words ^ (words >> np.uint64(32))) * MIX
    return ((words >> np.uint64(40)).astype(np.float32) / 2**21 - 4).astype(np.float32)


def lone_logits(history: Sequence[int], info: RunnerInfo) -> NDArray[np.float32]:
    """The logits `[vocab_size]` after a history, computed without pages, states or batches."""
    hashes = [page_hash(np.array(history, np.float64)) for _ in info.num_pages]
    if any(isinstance(spec, StateSpec) for spec in info.caches):
        state = 0
        for token in history:
            state = (state * FACTOR + token + 1) % PRIME
        hashes.append(state)
    return hash_logits(hashes, info.vocab_size)


def check_batch(batch: StepBatch, info: RunnerInfo, has_states: bool = True) -> None:
    """Assert every promise of the step contract."""
    rows, tokens = batch.num_sequences, batch.num_tokens
    arrays = {name: value for name, value in vars(batch).items() if name != "block_tables"} | dict(batch.block_tables)
    assert all(array.dtype == np.int32 for array in arrays.values()), {k: v.dtype for k, v in arrays.items()}
    assert 0 < rows <= info.max_batch_size
    assert 0 < tokens <= info.max_num_tokens
    counts = np.diff(batch.cu_seqlens)
    assert batch.cu_seqlens.shape == (rows + 1,)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == tokens
    assert (counts > 0).all()
    ends = batch.context_lens + counts
    assert (batch.context_lens >= 0).all()
    assert (ends <= info.max_seq_len).all()
    expected = np.concatenate([np.arange(a, b) for a, b in zip(batch.context_lens, ends, strict=True)])
    assert np.array_equal(batch.positions, expected)
    assert ((batch.input_ids >= 0) & (batch.input_ids < info.vocab_size)).all()
    assert set(batch.logits_indices) <= set(batch.cu_seqlens[1:] - 1)
    assert (np.diff(batch.logits_indices) > 0).all()
    for slots in (batch.state_src, batch.state_dst):
        assert len(set(slots)) == rows
        if has_states:
            assert ((slots > 0) & (slots < info.num_slots)).all()
    assert set(batch.block_tables) == set(info.num_pages)
    for group, table in batch.block_tables.items():
        used = -(-ends // info.page_size)
        assert table.shape[0] == rows
        live = np.arange(table.shape[1]) < used[:, None]
        assert used.max() <= table.shape[1]
        assert (table[~live] == 0).all()
        assert ((table[live] > 0) & (table[live] < info.num_pages[group])).all()
        assert len(set(table[live])) == live.sum()
