"""Requests come, fork, repeat, are swapped, recomputed, aborted and late, in any order; each gets its lone answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
from engine_strategies import LONGEST, PARAMS, REQUESTS, SmallEngine
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
from lone_run import Answer, lone_answer
from null_runner import NullRunner, lone_logits

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Output, Request, SamplingParams
from hybridtrt.runtime.runner import RunnerInfo

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


@dataclass
class Tracked:
    """A request with what it has got so far and what it may get."""

    request: Request
    info: RunnerInfo
    deadline: float | None
    cancelled: bool = False
    answers: list[Answer] = field(default_factory=list)
    ended: list[str | None] = field(default_factory=list)

    @cached_property
    def expected(self) -> list[Answer]:
        def logits(history: Sequence[int]) -> Any:
            return lone_logits(history, self.info)

        return [lone_answer(self.request, i, self.info, logits) for i in range(self.request.params.n)]

    @property
    def work(self) -> int:
        """Tokens to run."""
        return len(self.request.prompt_ids) + self.request.params.n * self.request.params.max_tokens


class EngineMachine(RuleBasedStateMachine):
    """Drives one engine and holds every output against the lone run."""

    def __init__(self, small: SmallEngine) -> None:
        super().__init__()
        self.small = small

    @initialize(
        backlog=st.lists(REQUESTS, min_size=3, max_size=8),
        options=st.tuples(st.sampled_from([None, 1, 3, 7]), st.sampled_from([4, 8, 256]), st.sampled_from([0.1, 60.0])),
        breaks=st.sampled_from([False, False, False, True]),
    )
    def start(self, backlog: list[Request], options: tuple[int | None, int, float], breaks: bool) -> None:
        self.breaks = breaks
        self.now = 0.0
        self.runner = NullRunner(self.small.info, on_step=self._break)
        self.engine = Engine(
            self.runner,
            options=self.small.options(*options),
            profile=self.small.profile if self.small.optimistic else None,
            clock=lambda: self.now,
        )
        self.live: dict[str, Tracked] = {}
        self.past: list[Tracked] = []
        self.count = 0
        self.breaking = False
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
    @rule(which=st.integers(0, 10**6), params=PARAMS, part=st.integers(0, 12))
    def go_on(self, which: int, params: SamplingParams, part: int) -> None:
        """A later turn: an earlier prompt with a part of its answer."""
        earlier = self.past[which % len(self.past)]
        prompt = (*earlier.request.prompt_ids, *earlier.expected[0].token_ids[:part])[: LONGEST - params.max_tokens]
        self.submit(Request("", prompt, params, cache_salt=earlier.request.cache_salt))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 10**6), at_once=st.booleans())
    def cancel(self, which: int, at_once: bool) -> None:
        name = list(self.live)[which % len(self.live)]
        self.live[name].cancelled = True
        self.engine.cancel(name)
        if at_once:
            self._step()
            assert name not in self.live

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

    def _break(self, batch: StepBatch) -> None:
        self.runner.batches.clear()
        if self.breaking:
            self.breaking = False
            self.broken = True
            raise RuntimeError("broken")

    def _step(self) -> None:
        self.sound = self.broken = False
        self.now += STEP_SECONDS
        for output in self.engine.step():
            self._take(output)
        self.breaking = False
        late = [t for t in self.live.values() if t.deadline is not None and t.deadline < self.now]
        assert not late, "a deadline has passed"
        self.engine.check_integrity()
        self.sound = True

    def _take(self, output: Output) -> None:
        tracked = self.live[output.request_id]
        n = tracked.request.params.n
        while len(tracked.answers) < n:
            tracked.answers.append(Answer())
            tracked.ended.append(None)
        answer = tracked.answers[output.index]
        assert tracked.ended[output.index] is None, "an answer goes on after its end"
        if output.finish_reason is None:
            assert len(output.token_ids) >= tracked.request.params.stream_interval
        answer.token_ids += output.token_ids
        answer.log_probs += output.log_probs
        answer.top_log_probs += output.top_log_probs
        answer.prompt_log_probs += output.prompt_log_probs
        tracked.ended[output.index] = output.finish_reason
        if output.finish_reason is not None:
            self._compare(tracked, output)
        if output.ends_request:
            self.past.append(self.live.pop(output.request_id))

    def _compare(self, tracked: Tracked, output: Output) -> None:
        got, expected = tracked.answers[output.index], tracked.expected[output.index]
        if output.finish_reason in ("stop", "length"):
            got.finish_reason = output.finish_reason
            assert got == expected
            assert output.more == any(reason is None for reason in tracked.ended)
            return
        reasons = {
            "cancelled": tracked.cancelled,
            "timed_out": tracked.deadline is not None and tracked.deadline <= self.now,
            "error": self.broken and output.error == "RuntimeError: broken",
        }
        assert reasons[output.finish_reason or ""], output
        assert got.token_ids == expected.token_ids[: len(got.token_ids)]
        assert got.log_probs == expected.log_probs[: len(got.log_probs)]


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_the_lone_one_whatever_happens(case: str) -> None:
    small, covered = CASES[case]
    TOTALS.clear()
    for _ in range(5):  # until it has shown what it should
        run_state_machine_as_test(
            lambda: EngineMachine(small),
            settings=settings(max_examples=8, stateful_step_count=100, deadline=None, print_blob=True),
        )
        if TOTALS["operations"] >= 700 and all(TOTALS[name] for name in covered):
            return
    pytest.fail(f"too little has happened: {TOTALS}")
