"""What steps of a runner cost by their shape, and what copying its caches costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from hybridtrt.converters.memory import PageGroup, cache_memory
from hybridtrt.plugins.step import Int32, StepBatch
from hybridtrt.runtime.profile import StepProfile
from hybridtrt.runtime.runner import Runner, RunnerInfo, TracingRunner

REPEATS = 3
COPIED_PAGES = 32  # of each group, at most


class StepProfiler:
    """Times steps of an idle runner, with random tokens and caches of any content. Leaves the caches dirty."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self._runner = runner
        self._info = runner.info
        self._groups = cache_memory(self._info.caches).groups
        self._rng = np.random.default_rng(seed)

    def decode(self) -> tuple[StepProfile, ...]:
        """Steps of 1, 2, 4 ... rows of one token up to the largest batch, half-way to the longest sequence."""
        context = (self._info.max_seq_len - 1) // 2
        return tuple(self._profile(self.batch(rows, 1, context), rows) for rows in doublings(self._info.max_batch_size))

    def prefill(self) -> tuple[StepProfile, ...]:
        """First chunks of 1, 2, 4 ... tokens up to the largest step."""
        most = min(self._info.max_num_tokens, self._info.max_seq_len)
        return tuple(self._profile(self.batch(1, count, 0), count) for count in doublings(most))

    def copy_bytes_per_s(self) -> float:
        """Bytes a second, one way, of saving caches as one sequence holds them and of writing them back."""
        info, memory = self._info, cache_memory(self._info.caches)
        pages = {group: list(range(1, min(COPIED_PAGES + 1, count))) for group, count in info.num_pages.items()}
        slots = [1] if memory.state_bytes else []
        moved = memory.state_bytes + sum(
            len(pages[group]) * info.page_size * size for group, size in memory.kv_bytes_per_token.items()
        )
        saved = self._runner.save(pages, slots)
        seconds = _median_seconds(lambda: self._runner.save(pages, slots))
        seconds += _median_seconds(lambda: self._runner.restore(saved, pages, slots))
        return 2 * max(moved, 1) / seconds

    def _profile(self, batch: StepBatch, tokens: int) -> StepProfile:
        self._runner.step(batch)
        seconds = _median_seconds(lambda: self._runner.step(batch))
        return StepProfile(tokens, seconds, active_experts(self._runner, batch))

    def batch(self, rows: int, count: int, context: int) -> StepBatch:
        """`rows` rows of `count` tokens, each after `context` tokens, with pages of their own as far as there are."""
        slots = np.arange(1, rows + 1, dtype=np.int32)
        cu_seqlens = np.arange(rows + 1, dtype=np.int32) * count
        return StepBatch(
            input_ids=self._rng.integers(0, self._info.vocab_size, rows * count, np.int32),
            positions=np.tile(np.arange(context, context + count, dtype=np.int32), rows),
            cu_seqlens=cu_seqlens,
            context_lens=np.full(rows, context, np.int32),
            state_src=slots,
            state_dst=slots,
            logits_indices=cu_seqlens[1:] - 1,
            block_tables={
                name: self._table(group, rows, context, context + count) for name, group in self._groups.items()
            },
        )

    def _table(self, group: PageGroup, rows: int, context: int, end: int) -> Int32:
        """The block table `[rows, P]` of a group, without the pages before the window and beyond the limit."""
        size, usable = self._info.page_size, self._info.num_pages[group.name] - 1
        first = 0 if group.window is None else max(context - group.window + 1, 0) // size
        last = -(-(end if group.limit is None else min(end, group.limit)) // size)
        table = np.zeros((rows, -(-end // size)), np.int32)
        held = table[:, first:last]
        held[:] = 1 + np.arange(held.size).reshape(held.shape) % usable
        return table


def active_experts(runner: Runner, batch: StepBatch) -> float | None:
    """Experts with at least one token of a step, mean over the MoE layers; None where the runner cannot tell."""
    if not isinstance(runner, TracingRunner):
        return None
    program = runner.program
    layers = [(node.inputs[2], node.weights["up"]) for node in program.nodes if node.op == "experts"]
    if not layers:
        return None
    chosen = runner.trace(batch, [experts for experts, _ in layers])
    # a number beyond the experts skips them all
    return statistics.fmean(
        np.count_nonzero(np.unique(chosen[experts]) < int(program.weights[up].shape[0])) for experts, up in layers
    )


def doublings(most: int) -> Iterator[int]:
    """1, 2, 4 ... below `most`, and `most`."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def touch_pools(runner: Runner, info: RunnerInfo) -> None:
    """Write every page and slot, so that memory that grows later is not theirs."""
    for group, pages in info.num_pages.items():
        for page in range(2, pages):
            runner.copy_pages({group: [(1, page)]})
    if cache_memory(info.caches).state_bytes:
        runner.clear_slots(range(1, info.num_slots))


def _median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
