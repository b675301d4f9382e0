"""Requests come, fork, repeat, are swapped, recomputed, aborted and late, in any order; each gets its lone answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from engine_strategies import LONGEST, PARAMS, REQUESTS, SmallEngine, tokenizer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from null_runner import NullRunner
from tracked_requests import Tracked

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Request, SamplingParams

STEP_SECONDS = 0.01

CASES = {  # engines, and what must have happened in them
    "recompute": (SmallEngine(token_seconds=1e-12), ["preempted_recompute", "hit_tokens"]),
    "swap": (
        SmallEngine(("full", "window"), {"window": 6}, num_tokens=8, swap_bytes=10_000),
        ["preempted_swap", "swapped_in", "hit_tokens"],
    ),
    "little room to swap": (
        SmallEngine(("full", "head"), limits={"head": 10}, states=False, swap_bytes=150, draft_tokens=2),
        ["preempted_swap", "preempted_recompute", "hit_tokens", "accepted_draft_tokens"],
    ),
    "short steps": (
        SmallEngine(("full", "window"), {"window": 9}, states=False, num_tokens=3, token_seconds=1e-12),
        ["preempted_recompute", "hit_tokens"],
    ),
    "drafts": (
        SmallEngine(("window",), {"window": 3}, num_tokens=8, optimistic=False, draft_tokens=4),
        ["hit_tokens", "accepted_draft_tokens"],
    ),
    "few slots": (SmallEngine((), num_slots=4, draft_tokens=3), ["hit_tokens", "accepted_draft_tokens"]),
    "one at a time": (SmallEngine(batch_size=1, num_slots=3, num_tokens=5, optimistic=False), ["hit_tokens"]),
    "no reuse": (
        SmallEngine(("full", "window"), {"window": 6}, num_tokens=12, reuse=False, swap_bytes=10_000, draft_tokens=2),
        ["preempted_swap", "swapped_in", "accepted_draft_tokens"],
    ),
}
TOTALS: Counter[str] = Counter()  # of all runs of the machine


class EngineMachine(RuleBasedStateMachine):
    """Drives one engine and holds every output against the lone run."""

    def __init__(self, small: SmallEngine) -> None:
        super().__init__()
        self.small = small

    @initialize(
        backlog=st.lists(REQUESTS, min_size=3, max_size=8),
        options=st.tuples(st.sampled_from([None, 1, 3, 7]), st.sampled_from([4, 8, 256]), st.sampled_from([0.1, 60.0])),
        breaks=st.booleans(),
    )
    def start(self, backlog: list[Request], options: tuple[int | None, int, float], breaks: bool) -> None:
        self.breaks = breaks
        self.now = 0.0
        self.runner = NullRunner(self.small.info, on_step=self._break)
        self.engine = Engine(
            self.runner,
            tokenizer(),
            options=self.small.options(*options),
            profile=self.small.profile if self.small.optimistic else None,
            clock=lambda: self.now,
        )
        self.live: dict[str, Tracked] = {}
        self.past: list[Tracked] = []
        self.count = 0
        self.breaking = False
        self.idle_steps = 0
        self.sound = True
        for request in backlog:
            self.submit(request)

    @rule(request=REQUESTS, copies=st.sampled_from([1, 1, 4]))
    def submit(self, request: Request, copies: int = 1) -> None:
        allotted = request.allotted_time_ms
        deadline = None if allotted is None else self.now + allotted / 1000
        for _ in range(copies):
            named = replace(request, id=str(self.count))
            self.count += 1
            self.live[named.id] = Tracked(named, self.engine.info, deadline)
            self.engine.submit(named)

    @precondition(lambda self: self.past)
    @rule(which=st.integers(1, 6), params=PARAMS, part=st.integers(0, 20))
    def go_on(self, which: int, params: SamplingParams, part: int) -> None:
        """A later turn: the prompt of one that has just ended with a part of its answer."""
        earlier = self.past[-min(which, len(self.past))]
        prompt = (*earlier.request.prompt_ids, *earlier.expected[0].token_ids[:part])[: LONGEST - params.max_tokens]
        self.submit(Request("", prompt, params, cache_salt=earlier.request.cache_salt))

    @rule(count=st.integers(1, 6), impatient=st.sampled_from([False, False, True]))
    def step(self, count: int, impatient: bool) -> None:
        """`impatient`: clients abort what is preempted."""
        for _ in range(count):
            self._step()
            for name in self._preempted() if impatient else ():
                self._cancel(name, False)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 10**6), at_once=st.booleans())
    def cancel(self, which: int, at_once: bool) -> None:
        self._cancel(list(self.live)[which % len(self.live)], at_once)

    @invariant()
    def count_operations(self) -> None:
        TOTALS["operations"] += 1

    @rule(seconds=st.sampled_from([0.002, 0.2, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaks)
    @rule()
    def break_a_step(self) -> None:
        self.breaking = True
        self._step()

    def teardown(self) -> None:
        if not getattr(self, "sound", False):
            return
        bound = 20 + 10 * sum(tracked.work for tracked in self.live.values())
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.live, "somebody starves"
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics["running"] == statistics["waiting"] == 0
        info = self.engine.info
        TOTALS.update({name: value for name, value in statistics.items() if isinstance(value, int)})
        usages = [(statistics["pages"][group], count) for group, count in info.num_pages.items()]
        if self.runner.has_states:
            usages.append((statistics["slots"], info.num_slots))
        for usage, count in usages:
            assert (usage["used"], usage["promised"]) == (0, 0)
            assert usage["free"] + usage["cached"] == count - 1

    def _preempted(self) -> list[str]:
        return [sequence.request.id for sequence in self.engine._scheduler.waiting if sequence.output_ids]

    def _cancel(self, name: str, at_once: bool) -> None:
        self.live[name].cancelled = True
        self.engine.cancel(name)
        if at_once:
            self._step()
            assert name not in self.live

    def _break(self, batch: StepBatch) -> None:
        self.runner.batches.clear()
        self.ran = True
        if self.breaking:
            self.breaking = False
            self.broken = True
            self._write_nonsense(batch)
            raise RuntimeError("broken")

    def _write_nonsense(self, batch: StepBatch) -> None:
        """Where a step that fails may have written before it did."""
        self.runner.states[batch.state_dst] = np.nan
        rows = np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens))
        for group, table in batch.block_tables.items():
            columns, offsets = np.divmod(batch.positions, self.engine.info.page_size)
            kept = columns < table.shape[1]  # not so beyond a limit
            self.runner.pages[group][table[rows[kept], columns[kept]], offsets[kept]] = np.nan

    def _step(self) -> None:
        self.sound = self.broken = self.ran = False
        self.now += STEP_SECONDS
        for output in self.engine.step():
            self.live[output.request_id].take(output, self.now, self.broken)
            if output.ends_request:
                self.past.append(self.live.pop(output.request_id))
        self.breaking = False
        self.idle_steps = 0 if self.ran or not self.live else self.idle_steps + 1
        assert self.idle_steps < 2, "requests wait and nothing runs"
        assert not any(tracked.is_late(self.now) for tracked in self.live.values())
        self.engine.check_integrity()
        self.sound = True


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_the_lone_one_whatever_happens(case: str) -> None:
    small, covered = CASES[case]
    TOTALS.clear()
    for _ in range(5):  # until it has shown what it should
        run_state_machine_as_test(
            lambda: EngineMachine(small),
            settings=settings(max_examples=13, stateful_step_count=100, deadline=None, print_blob=True),
        )
        if TOTALS["operations"] >= 1_000 and all(TOTALS[name] for name in covered):
            return
    pytest.fail(f"too little has happened: {TOTALS}")
