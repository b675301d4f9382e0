"""Schedulers without a runner: sequences of token 1, and plans held against what was promised."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from null_runner import null_info
from step_contract import check_batch

from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.answer import Answer
from hybridtrt.runtime.batch import BatchBuilder
from hybridtrt.runtime.cache_manager import CacheManager, CacheOptions
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import Costs, RunnerInfo
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler
from hybridtrt.runtime.sequence import Sequence

SWAPPING, RECOMPUTING = Costs(seconds_per_token=1.0), Costs(seconds_per_token=1e-12)
UTILIZE = CacheOptions(reserve=False)
NUMBERS = itertools.count()


@dataclass
class Drafter:
    """Proposes token 1, which is what `run` samples, or another one."""

    wrong: bool = False
    proposed: int = 0

    def append(self, token: int) -> None:
        pass

    def propose(self, limit: int) -> list[int]:
        self.proposed += limit
        return [2 if self.wrong else 1] * limit


def make_scheduler(
    batch: int = 8,
    tokens: int = 32,
    chunk: int | None = None,
    pages: int = 65,
    slots: int = 9,
    drafts: int = 0,
    options: CacheOptions | None = None,
    costs: Costs = RECOMPUTING,
    info: RunnerInfo | None = None,
) -> Scheduler:
    info = info or null_info(num_pages={"full": pages}, num_slots=slots)
    caches = CacheManager(info, options or CacheOptions(), Admission(info))
    return Scheduler(Limits(batch, tokens, chunk, drafts), caches, costs)


def make_sequence(
    name: str,
    prompt: int = 5,
    max_tokens: int = 4,
    priority: float = 0.0,
    text: int | None = None,
    index: int = 0,
    drafter: Drafter | None = None,
) -> Sequence:
    """A sequence of a text, else of one like no other; those that were made first go first."""
    number = next(NUMBERS)
    ids = (number if text is None else text, *range(1, prompt))
    request = Request(name, ids, SamplingParams(max_tokens))
    answer, rank = Answer(request, index, None), (-priority, number)
    return Sequence(request, np.array(ids, np.int32), answer, rank=rank, drafter=drafter)  # type: ignore[arg-type]


def commit(scheduler: Scheduler, plan: Plan) -> dict[str, int]:
    """Run a plan and sample token 1 everywhere, as the engine does; returns the tokens that each request ran."""
    assert not plan.failed
    scheduler.caches.commit_singles(plan.sequences, plan.rows, plan.now, np.ones(plan.singles, np.int64))
    for i, (sequence, count, wanted) in enumerate(zip(plan.sequences, plan.counts, plan.logits, strict=True)):
        drafts, sequence.drafts = sequence.drafts, []
        if not drafts and i >= plan.singles:
            scheduler.caches.commit(sequence, count)
        if wanted:
            followers, sequence.followers = sequence.followers, []
            forked = [follower for follower in followers if scheduler.fork(sequence, follower) is not None]
            for answer in (sequence, *forked):
                accept(scheduler, answer, drafts)
    return dict(zip([sequence.request.id for sequence in plan.sequences], plan.counts, strict=True))


def accept(scheduler: Scheduler, sequence: Sequence, drafts: list[int]) -> None:
    accepted = len(drafts) if 1 in drafts else 0
    reasons = [sequence.append(1, 0.0, (), True) for _ in range(1 + accepted)]
    if any(reasons):
        scheduler.remove(sequence, keep=not drafts)
    elif drafts and (accepted or scheduler.caches.slots is None):
        scheduler.caches.commit(sequence, 1 + accepted)


def run(scheduler: Scheduler) -> dict[str, int]:
    return commit(scheduler, scheduler.schedule())


def waiting(scheduler: Scheduler) -> list[str]:
    return [sequence.request.id for sequence in sorted(scheduler.waiting, key=lambda sequence: sequence.rank)]


@dataclass
class Driver:
    """Runs a scheduler and holds each plan against what was promised."""

    scheduler: Scheduler
    info: RunnerInfo
    seen: Counter[str] = field(default_factory=Counter)
    builder: BatchBuilder = field(init=False)

    def __post_init__(self) -> None:
        self.builder = BatchBuilder(self.scheduler.caches, self.info.max_batch_size, self.info.max_seq_len)

    def step(self) -> None:
        scheduler, caches = self.scheduler, self.scheduler.caches
        first = min(scheduler.running.values(), key=lambda sequence: sequence.rank, default=None)
        waiting = sorted(sequence.rank for sequence in scheduler.waiting)
        plan = scheduler.schedule()
        assert plan.sequences or plan.preempted, "work is left and nothing runs"
        assert plan.num_tokens <= scheduler.limits.max_num_tokens
        assert len(plan.sequences) <= len(scheduler.running) <= scheduler.limits.max_batch_size
        assert first is None or first.running, "the sequence of lowest rank was preempted"
        assert not (plan.preempted and caches.options.reserve), "somebody was preempted whose pages were promised"
        assert caches.swap.used <= caches.swap.capacity
        admitted = [*plan.hits, *plan.swapped_in]
        assert sorted(sequence.rank for sequence, _ in admitted) == waiting[: len(admitted)], "somebody was overtaken"
        scheduler.check_integrity()
        if plan.sequences:
            self.check_batch(plan)
        self.seen["hits"] += sum(hit.tokens for _, hit in plan.hits)
        self.count(plan)
        commit(scheduler, plan)

    def preempt(self, sequence: Sequence) -> None:
        plan = Plan()
        self.scheduler.preempt(sequence, plan)
        self.count(plan)

    def count(self, plan: Plan) -> None:
        self.seen["recomputed"] += plan.recomputed
        self.seen["swapped out"] += len(plan.swapped_out)
        self.seen["swapped in"] += len(plan.swapped_in)

    def check_batch(self, plan: Plan) -> None:
        batch = self.builder.build(plan)
        check_batch(batch, self.info)
        sequences, counts = plan.sequences, plan.counts
        pending = [sequence.pending(count) for sequence, count in zip(sequences, counts, strict=True)]
        assert batch.input_ids.tolist() == np.concatenate(pending).tolist()
        assert batch.context_lens.tolist() == [sequence.computed for sequence in sequences]
        assert batch.state_src.tolist() == [sequence.source for sequence in sequences]
        assert batch.state_dst.tolist() == [sequence.target for sequence in sequences]
        for i, table in enumerate(batch.block_tables.values()):
            for row, sequence in zip(table.tolist(), sequences, strict=True):
                pages = sequence.holdings[i].pages[: len(row)]
                assert row == pages + [0] * (len(row) - len(pages))
