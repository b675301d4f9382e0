"""A runner without a network: its logits depend on every token of the history, read back through pages and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from step_contract import check_batch, has_states, page_specs

from hybridtrt.plugins.caches import CacheSpec, PageSpec, StateSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.runner import RunnerInfo

PRIME = 1_048_573  # sums of thousands of weighted hashes are exact in float64
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
    windows: Mapping[str, int] | None = None,
    limits: Mapping[str, int] | None = None,
) -> RunnerInfo:
    """Limits of a small engine with page groups "full" and "window", unless others are given, and one state pool.

    `windows` and `limits` are those of page groups; no other group has one, whatever its name.
    """
    num_pages = {"full": 65, "window": 65} if num_pages is None else num_pages
    windows, limits = windows or {}, limits or {}
    caches: list[CacheSpec] = [
        PageSpec(f"layers.{i}.kv", group, (1,), window=windows.get(group), limit=limits.get(group))
        for i, group in enumerate(num_pages)
    ]
    if states:
        caches.append(StateSpec("layers.9.state", (1,)))
    return RunnerInfo(
        vocab_size=vocab_size,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_logits_rows=max_num_tokens,
        max_seq_len=max_seq_len,
        page_size=page_size,
        num_pages=num_pages,
        num_slots=num_slots,
        caches=tuple(caches),
        eos_token_ids=eos_token_ids,
    )


class NullRunner:
    """Keeps a running hash in a state pool and each token's in the pages, and checks every batch against the contract.

    As keys and values of a real layer do, what a page holds of a token depends on all tokens before it. So a wrong
    slot, page, position, order or cut, a page of another history, or a state that survives its owner changes the
    logits, and a NaN that is read makes them NaN. `on_step` is called with each batch before it runs and may raise;
    `nan_token` makes the logits NaN for sequences that begin with it.
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
        self.has_states = has_states(info)
        self.batches: list[StepBatch] = []
        self.closed = False

    def clear_slots(self, slots: Sequence[int]) -> None:
        assert self.has_states
        assert all(0 < slot < len(self.states) for slot in slots), slots
        self.states[list(slots)] = 0

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        for group, pairs in copies.items():
            sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
            assert 0 not in sources + targets
            assert len(set(targets)) == len(targets)
            assert not set(sources) & set(targets)
            self.pages[group][targets] = self.pages[group][sources]

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Any:
        assert self.has_states or not slots
        return {group: self.pages[group][list(numbers)] for group, numbers in pages.items()}, self.states[list(slots)]

    def restore(self, saved: Any, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        assert 0 not in slots
        contents, states = saved
        assert contents.keys() == pages.keys()
        self.states[list(slots)] = states
        for group, numbers in pages.items():
            assert 0 not in numbers
            self.pages[group][list(numbers)] = contents[group]

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        assert 0 not in slots
        self.states[list(slots)] = np.nan
        for group, numbers in pages.items():
            assert 0 not in numbers
            self.pages[group][list(numbers)] = np.nan

    def close(self) -> None:
        self.closed = True

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        check_batch(batch, self.info)
        self.batches.append(batch)
        if self.on_step is not None:
            self.on_step(batch)
        logits = []
        for row in range(batch.num_sequences):
            start, stop = batch.cu_seqlens[row : row + 2]
            wanted = batch.logits_indices[(batch.logits_indices >= start) & (batch.logits_indices < stop)]
            logits += self._run(batch, row, batch.input_ids[start:stop].tolist(), (wanted - start).tolist())
        return np.stack(logits) if logits else np.zeros((0, self.info.vocab_size), np.float32)

    def _run(self, batch: StepBatch, row: int, tokens: list[int], wanted: list[int]) -> list[NDArray[np.float32]]:
        """Write the tokens of one row, and return the logits of those that want them."""
        context = int(batch.context_lens[row])
        hashes: list[list[float]] = [[] for _ in wanted]
        invalid = False
        for spec in page_specs(self.info):
            pool, table = self.pages[spec.group], batch.block_tables[spec.group][row]
            places = np.arange(min(context + len(tokens), spec.limit or self.info.max_seq_len))
            pages, offsets = table[places // self.info.page_size], places % self.info.page_size
            if context < len(places):
                before = pool[pages[context - 1], offsets[context - 1]] if context else 0.0
                pool[pages[context:], offsets[context:]] = running_hash(before, tokens)[: len(places) - context]
            for own, index in zip(hashes, wanted, strict=True):
                seen = visible(spec, context + index)
                own.append(page_hash(pool[pages[seen], offsets[seen]], seen.start))
            if self.nan_token is not None and spec.window is None:
                invalid |= bool(pool[pages[0], 0] == self.nan_token + 1)
        if self.has_states:
            states = running_hash(float(self.states[batch.state_src[row]]), tokens)
            self.states[batch.state_dst[row]] = states[-1]
            for own, index in zip(hashes, wanted, strict=True):
                own.append(states[index])
        size = self.info.vocab_size
        return [np.full(size, np.nan, np.float32) if invalid else hash_logits(own, size) for own in hashes]


def visible(spec: PageSpec, position: int) -> slice:
    """The positions that a query reads from the pages of a group."""
    first = 0 if spec.window is None else max(position + 1 - spec.window, 0)
    return slice(first, position + 1 if spec.limit is None else min(position + 1, spec.limit))


def running_hash(value: float, tokens: Sequence[int]) -> list[float]:
    """The hash after each token, going on from `value`; NaN if that is."""
    values = []
    for token in tokens:
        value = (value * FACTOR + token + 1) % PRIME
        values.append(value)
    return values


def page_hash(values: NDArray[np.float64], first: int) -> float:
    """A hash of values and their places, which begin with `first`; NaN if one is NaN."""
    weights = np.arange(first + 1, first + 1 + len(values)) * 7919 % 10007
    return float((values + 1) @ weights % PRIME)


def hash_logits(hashes: Sequence[float], vocab_size: int) -> NDArray[np.float32]:
    """Logits `[vocab_size]` in -4..4 that change altogether with any of the hashes; NaN if one is NaN."""
    if not np.isfinite(hashes).all():
        return np.full(vocab_size, np.nan, np.float32)
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
    values = np.array(running_hash(0.0, history))
    seen = [visible(spec, len(history) - 1) for spec in page_specs(info)]
    hashes = [page_hash(values[places], places.start) for places in seen]
    if has_states(info):
        hashes.append(values[-1])
    return hash_logits(hashes, info.vocab_size)
