"""The scheduler: budgets, order, admission, preemption, drafts, forks and accounts. No tensors, no runner."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import check_batch, null_info

from hybridtrt.plugins.caches import pages_held
from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.answer import Answer
from hybridtrt.runtime.batch import BatchBuilder
from hybridtrt.runtime.cache_manager import CacheManager, CacheOptions
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import Costs, RunnerInfo
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.swap import Swapped, SwapSpace

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
    for sequence, count, wanted in zip(plan.sequences, plan.counts, plan.logits, strict=True):
        drafts, sequence.drafts = sequence.drafts, []
        if not drafts:
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
        for i, (group, table) in enumerate(batch.block_tables.items()):
            for row, sequence in zip(table, plan.sequences, strict=True):
                assert set(row) <= {0, *sequence.holdings[i].held}, f"a page of group {group} was given back"


LAYOUTS: list[dict[str, Any]] = [
    {"groups": ("full",)},
    {"groups": ("full", "window"), "windows": {"window": 6}},
    {"groups": ("window", "head"), "windows": {"window": 3}, "limits": {"head": 10}},
    {"groups": ("full", "window"), "windows": {"window": 9}, "states": False},
    {"groups": ()},
]


def test_decodes_come_first_and_chunks_fill_the_budget() -> None:
    scheduler = make_scheduler(tokens=10)
    scheduler.add(make_sequence("a", 3))
    scheduler.add(make_sequence("b", 2))
    assert run(scheduler) == {"a": 3, "b": 2}
    for name in "cde":
        scheduler.add(make_sequence(name, 6, 1))
    plan = scheduler.schedule()
    assert (plan.singles, plan.decode_tokens, plan.num_tokens) == (2, 2, 10)
    assert commit(scheduler, plan) == {"a": 1, "b": 1, "c": 6, "d": 2}


def test_a_prefill_goes_on_before_a_new_one_is_admitted() -> None:
    scheduler = make_scheduler(tokens=4, options=CacheOptions(reuse=False))
    scheduler.add(make_sequence("long", 10, 1))
    scheduler.add(make_sequence("next", 3, 1))
    assert [run(scheduler) for _ in range(4)] == [{"long": 4}, {"long": 4}, {"long": 2, "next": 2}, {"next": 1}]


@pytest.mark.parametrize(("chunk", "steps"), [(1, 7), (2, 4), (3, 3), (7, 1), (64, 1)])
def test_chunks_are_bounded_for_each_sequence(chunk: int, steps: int) -> None:
    scheduler = make_scheduler(chunk=chunk, options=CacheOptions(reuse=False))
    scheduler.add(make_sequence("a", 7, 1))
    scheduler.add(make_sequence("b", 7, 1))
    counts = [run(scheduler) for _ in range(steps)]
    assert not scheduler.has_work
    assert all(count == {"a": min(chunk, 7), "b": min(chunk, 7)} for count in counts[:-1])


def test_without_states_no_snapshot_is_due() -> None:
    scheduler = make_scheduler(options=CacheOptions(snapshot_interval=12), info=null_info(states=False))
    scheduler.add(make_sequence("a", 22, 1))
    assert run(scheduler) == {"a": 22}


def test_chunks_end_where_a_snapshot_is_due() -> None:
    scheduler = make_scheduler(options=CacheOptions(snapshot_interval=12))
    scheduler.add(make_sequence("a", 22, 1))
    assert [run(scheduler)["a"] for _ in range(3)] == [12, 8, 2]
    slots = scheduler.caches.slots
    assert sorted(slots.records[slot].tokens for slot in slots._snapshots.values()) == [12, 20]


def test_one_token_that_is_left_of_the_budget_starts_a_prefill() -> None:
    scheduler = make_scheduler(tokens=6)
    scheduler.add(make_sequence("a", 5))
    scheduler.add(make_sequence("b", 5))
    plan = scheduler.schedule()
    assert (plan.counts, plan.singles, plan.logits) == ([5, 1], 0, [1, 0])
    assert [sequence.request.id for sequence in plan.started] == ["a", "b"]


def test_more_sequences_than_tokens_of_a_step_are_not_admitted() -> None:
    scheduler = make_scheduler(batch=8, tokens=3)
    for name in "abcde":
        scheduler.add(make_sequence(name, 1, 50))
    for _ in range(5):
        run(scheduler)
    assert run(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_slots_bound_the_batch() -> None:
    scheduler = make_scheduler(slots=3)
    for name in "abc":
        scheduler.add(make_sequence(name, 2, 2))
    assert run(scheduler) == {"a": 2, "b": 2}
    assert run(scheduler) == {"a": 1, "b": 1}
    assert run(scheduler) == {"c": 2}


def test_nobody_overtakes_the_first_that_waits() -> None:
    scheduler = make_scheduler(pages=6)  # 20 tokens
    scheduler.add(make_sequence("a", 8, 5))  # 3 pages
    scheduler.add(make_sequence("large", 14, 3))  # 4 pages, not yet
    scheduler.add(make_sequence("small", 1, 1))
    assert run(scheduler) == {"a": 8}
    assert waiting(scheduler) == ["large", "small"]
    while scheduler.running:
        assert set(run(scheduler)) == {"a"}
    assert run(scheduler)["large"] == 12


def test_those_of_low_rank_go_first_and_of_equal_priority_the_first() -> None:
    scheduler = make_scheduler(batch=1)
    for name, priority in (("a", 0.5), ("b", 0.5), ("urgent", 1), ("idle", 0), ("c", 0.5)):
        scheduler.add(make_sequence(name, 1, 1, priority))
    order = [name for _ in range(5) for name in run(scheduler)]
    assert order == ["urgent", "a", "b", "c", "idle"]


def test_pages_are_promised_at_admission_and_handed_out_as_needed() -> None:
    scheduler = make_scheduler(pages=11)
    scheduler.add(make_sequence("a", 5, 20))  # 24 tokens in the caches at most: 6 pages
    pool = scheduler.caches.pools[0]
    run(scheduler)
    assert (pool.used, pool.promised, pool.available) == (2, 4, 4)
    scheduler.add(make_sequence("b", 5, 13))  # 5 pages
    for _ in range(3):
        run(scheduler)
    assert waiting(scheduler) == ["b"]
    assert (pool.used, pool.promised) == (2, 4)
    run(scheduler)
    assert (pool.used, pool.promised) == (3, 3)


def test_pages_that_others_hold_need_no_room() -> None:
    scheduler = make_scheduler(info=null_info(num_pages={"full": 9}, states=False))
    scheduler.add(make_sequence("a", 20, 5, text=0))  # 6 pages
    run(scheduler)
    scheduler.add(make_sequence("b", 20, 5, text=0))  # 4 of these and 2 more
    assert run(scheduler) == {"a": 1, "b": 4}
    scheduler.check_integrity()


def test_utilization_admits_by_what_is_expected() -> None:
    scheduler = make_scheduler(pages=11, options=UTILIZE)
    scheduler.add(make_sequence("a", 5, 20))  # 4 pages on average
    scheduler.add(make_sequence("b", 5, 13))  # 3
    scheduler.add(make_sequence("c", 9, 9))  # 4, of 3 that are left
    assert run(scheduler) == {"a": 5, "b": 5}
    pool = scheduler.caches.pools[0]
    assert (pool.used, pool.promised, pool.expected) == (4, 0, 7)
    assert waiting(scheduler) == ["c"]


def test_a_request_that_fits_exactly_runs_to_its_end() -> None:
    for options in (CacheOptions(), UTILIZE):
        scheduler = make_scheduler(pages=6, options=options)
        scheduler.caches.pages.check_fits(20)
        scheduler.add(make_sequence("a", 10, 11))
        while scheduler.has_work:
            assert run(scheduler)
        scheduler.check_integrity()
    with pytest.raises(ValueError, match=r"21 tokens need 6 pages of 4 tokens, but page group 'full' has 5"):
        scheduler.caches.pages.check_fits(21)


def crowd(swap_bytes: int = 0, costs: Costs = RECOMPUTING) -> Scheduler:
    """Three sequences that fill the 12 pages, four each, when they have run 16 tokens; the first made goes last."""
    options = CacheOptions(reserve=False, reuse=False, swap_bytes=swap_bytes)
    scheduler = make_scheduler(pages=13, options=options, costs=costs)
    for name, priority in (("last", 0), ("first", 1), ("second", 0.5)):
        scheduler.add(make_sequence(name, 4, 17, priority))
    for _ in range(13):
        assert set(run(scheduler)) == {"last", "first", "second"}
    return scheduler


def test_the_running_sequence_of_highest_rank_is_preempted() -> None:
    scheduler = crowd()
    plan = scheduler.schedule()
    assert (plan.recomputed, plan.swapped_out) == (1, [])
    assert commit(scheduler, plan) == {"first": 1, "second": 1}
    assert waiting(scheduler) == ["last"]
    scheduler.check_integrity()
    while scheduler.running:
        assert set(run(scheduler)) == {"first", "second"}
    assert [run(scheduler) for _ in range(4)] == [{"last": 17}, *[{"last": 1}] * 3]
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("swap_bytes", "costs", "swapped"),
    [(68, SWAPPING, True), (67, SWAPPING, False), (0, SWAPPING, False), (1000, RECOMPUTING, False)],
)
def test_the_cheaper_way_to_preempt_is_taken_while_there_is_room(swap_bytes: int, costs: Costs, swapped: bool) -> None:
    """Four pages of 16 bytes and a state of 4."""
    scheduler = crowd(swap_bytes, costs)
    last = scheduler.running["last/0"]
    pages = list(last.holdings[0].pages)
    plan = scheduler.schedule()
    assert (len(plan.swapped_out), plan.recomputed) == (swapped, not swapped)
    assert scheduler.caches.swap.used == 68 * swapped
    assert last.computed == 16 * swapped
    if last.swapped is not None:
        assert last.swapped.pages == {"full": pages}
    commit(scheduler, plan)
    scheduler.check_integrity()
    while scheduler.running:
        run(scheduler)
    plan = scheduler.schedule()
    assert [sequence for sequence, _ in plan.swapped_in] == [last] * swapped
    assert commit(scheduler, plan) == {"last": 1 if swapped else 17}
    assert scheduler.caches.swap.used == 0
    scheduler.check_integrity()


def test_only_what_has_been_computed_is_swapped() -> None:
    """Else a sequence that had pages for drafts might not get as many again as it needs to go on."""
    options = CacheOptions(reserve=False, reuse=False, swap_bytes=1000)
    scheduler = make_scheduler(pages=6, drafts=12, options=options, costs=SWAPPING)
    sequence = make_sequence("a", 3, 16, drafter=Drafter(wrong=True))
    scheduler.add(sequence)
    run(scheduler)
    plan = scheduler.schedule()
    assert len(sequence.holdings[0].pages) == 4
    scheduler.preempt(sequence, plan)
    assert sequence.swapped is not None
    assert sequence.swapped.num_bytes == 16 + 4
    scheduler.caches.pools[0].take(scheduler.caches.pools[0].open("other"), 4)
    assert run(scheduler) == {"a": 1}


def test_swap_space_is_bounded() -> None:
    space, swapped = SwapSpace(10), Swapped({}, [], [], 6)
    space.add(swapped)
    assert (space.fits(4), space.fits(5)) == (True, False)
    space.remove(swapped)
    assert space.fits(10)


def test_a_sequence_that_leaves_while_it_waits_gives_its_swapped_bytes_back() -> None:
    scheduler = crowd(68, SWAPPING)
    last = scheduler.running["last/0"]
    commit(scheduler, scheduler.schedule())
    scheduler.remove(last)
    assert scheduler.caches.swap.used == 0
    assert last not in scheduler.waiting
    scheduler.check_integrity()


def test_a_recomputed_sequence_goes_on_from_what_is_still_cached() -> None:
    scheduler = make_scheduler(options=UTILIZE)
    sequence = make_sequence("a", 6, 9)
    scheduler.add(sequence)
    while sequence.computed < 12:
        run(scheduler)
    scheduler.preempt(sequence, Plan())
    plan = scheduler.schedule()
    assert [hit.tokens for _, hit in plan.hits] == [12], "its states stayed as a snapshot"
    assert commit(scheduler, plan) == {"a": 1}


def test_drafts_take_what_nothing_else_wants_of_the_budget() -> None:
    scheduler = make_scheduler(tokens=8, drafts=4)
    scheduler.add(make_sequence("a", 3, 40, drafter=Drafter()))
    assert [run(scheduler) for _ in range(2)] == [{"a": 3}, {"a": 5}]
    scheduler.add(make_sequence("b", 19, 40))
    assert [run(scheduler) for _ in range(2)] == [{"a": 5, "b": 3}, {"a": 1, "b": 7}]


def test_drafts_do_not_go_beyond_the_end() -> None:
    drafter = Drafter()
    scheduler = make_scheduler(drafts=4)
    scheduler.add(make_sequence("a", 3, 4, drafter=drafter))
    assert [run(scheduler) for _ in range(2)] == [{"a": 3}, {"a": 3}]
    assert not scheduler.has_work
    assert drafter.proposed == 2


@pytest.mark.parametrize("states", [True, False])
def test_after_wrong_drafts_a_sequence_with_states_runs_the_sampled_tokens_again(states: bool) -> None:
    scheduler = make_scheduler(drafts=4, info=null_info(num_pages={"full": 65}, states=states))
    sequence = make_sequence("a", 3, 40, drafter=Drafter(wrong=True))
    scheduler.add(sequence)
    assert [run(scheduler)["a"] for _ in range(5)] == ([3, 5, 2, 5, 2] if states else [3, 5, 5, 5, 5])
    assert len(sequence.output_ids) == 5


def test_drafts_are_not_tried_without_a_second_slot() -> None:
    scheduler = make_scheduler(slots=2, drafts=4)
    scheduler.add(make_sequence("a", 3, 40, drafter=Drafter()))
    assert [run(scheduler) for _ in range(3)] == [{"a": 3}, {"a": 1}, {"a": 1}]


def test_drafts_take_no_pages_that_a_sampled_token_needs() -> None:
    options = CacheOptions(reserve=False, reuse=False)
    scheduler = make_scheduler(pages=5, drafts=4, options=options)
    for name in "ab":
        scheduler.add(make_sequence(name, 4, 8, drafter=Drafter()))
    assert run(scheduler) == {"a": 4, "b": 4}
    plan = scheduler.schedule()
    assert not plan.preempted
    assert set(commit(scheduler, plan)) == {"a", "b"}


def test_block_tables_forget_pages_that_were_given_back_in_vain() -> None:
    """Growing for drafts gives pages back before it finds that there are no others."""
    info = null_info(num_pages={"full": 5, "window": 9}, windows={"window": 3})
    driver = Driver(make_scheduler(drafts=4, options=CacheOptions(reserve=False, reuse=False), info=info), info)
    sequence = make_sequence("a", 8, 8, text=0)
    driver.scheduler.add(sequence)
    driver.step()
    driver.scheduler.add(make_sequence("b", 2, 3, text=0))  # it has the last page
    driver.step()
    driver.step()
    sequence.drafter = Drafter()  # type: ignore[assignment]
    driver.step()
    assert sequence.holdings[1].start == 2
    assert sequence.total == 12


def test_a_follower_shares_what_its_leader_has_and_copies_the_last_page() -> None:
    scheduler = make_scheduler(options=CacheOptions(reserve=False, reuse=False))
    leader, follower = make_sequence("leader", 10), make_sequence("follower", 10)
    scheduler.add(leader)
    run(scheduler)
    copies = scheduler.fork(leader, follower)
    pages, others = leader.holdings[0].pages, follower.holdings[0].pages
    assert pages[:2] == others[:2]
    assert copies == {"full": [(pages[2], others[2])]}
    assert leader.source == follower.source
    assert len({leader.source, leader.target, follower.target}) == 3
    scheduler.check_integrity()
    follower.append(1, 0.0, (), True)
    assert run(scheduler) == {"leader": 1, "follower": 1}
    assert (leader.source, follower.source) == (leader.target, follower.target)
    scheduler.check_integrity()


@pytest.mark.parametrize("size", [{"batch": 1}, {"tokens": 1}, {"pages": 5}, {"slots": 3}])
def test_a_follower_without_room_waits(size: dict[str, int]) -> None:
    scheduler = make_scheduler(**size)
    leader, follower = make_sequence("leader", 10), make_sequence("follower", 10)
    scheduler.add(leader)
    while not leader.output_ids:
        run(scheduler)
    assert scheduler.fork(leader, follower) is None
    assert waiting(scheduler) == ["follower"]
    scheduler.check_integrity()
    while scheduler.has_work:
        assert run(scheduler)
    assert len(follower.output_ids) == 4


def make_driver(rng: random.Random) -> Driver:
    """Of all policies, over pools that have room for little more than one sequence of 48 tokens."""
    layout = dict(rng.choice(LAYOUTS))
    tokens, spare = rng.choice([1, 3, 8, 20, 20]), rng.randint(0, 6)
    windows: Mapping[str, int] = layout.get("windows", {})
    limits: Mapping[str, int] = layout.get("limits", {})
    num_pages = {
        group: 1 + spare + pages_held(48, 4, windows.get(group), limits.get(group), tokens)
        for group in layout.pop("groups")
    }
    info = null_info(60, 6, tokens, 48, 4, num_pages, rng.choice([2, 5, 14, 14, 14]), **layout)
    options = CacheOptions(
        reserve=rng.random() < 0.2,
        reuse=rng.random() < 0.7,
        snapshot_interval=rng.choice([4, 12]),
        swap_bytes=rng.choice([0, 100, 10_000, 10_000, 10_000]),
    )
    chunk, drafts = rng.choice([None, None, 1, 7]), rng.choice([0, 1, 6])
    batch, costs = rng.choice([1, 4, 6, 6]), rng.choice([SWAPPING, SWAPPING, RECOMPUTING])
    return Driver(make_scheduler(batch, tokens, chunk, drafts=drafts, options=options, costs=costs, info=info), info)


def drive(driver: Driver, rng: random.Random) -> None:
    """Sequences of three texts come, fork, are preempted, leave and end."""
    scheduler = driver.scheduler
    live: list[Sequence] = []
    for step in range(100):
        if step < 30 and rng.random() < 0.7:
            prompt = rng.randint(1, rng.choice([6, 30]))
            most = rng.choice([48 - prompt, rng.randint(1, 48 - prompt)])
            options = (str(step), prompt, most, rng.choice([0, 0.5, 1]), rng.randrange(3))
            family = [
                make_sequence(*options, index=i, drafter=Drafter(rng.random() < 0.5))
                for i in range(rng.choice([1, 1, 3]))
            ]
            live += family
            family[0].followers = family[1:]
            scheduler.add(family[0])
        if live and rng.random() < 0.05:
            scheduler.remove(rng.choice(live))
        if scheduler.running and not scheduler.caches.options.reserve and rng.random() < 0.05:
            driver.preempt(rng.choice(list(scheduler.running.values())))
        if scheduler.has_work:
            driver.step()
    for _ in range(3_000):
        if scheduler.has_work:
            driver.step()
    scheduler.check_integrity()
    assert not scheduler.has_work, "somebody starves"
    assert all(pool.available == pool.usable for pool in scheduler.caches.pools)
    assert scheduler.caches.slots is None or scheduler.caches.slots.used == 0


def test_promises_hold_and_all_ends_whole() -> None:
    totals: Counter[str] = Counter()

    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def one(seed: int) -> None:
        rng = random.Random(seed)
        driver = make_driver(rng)
        drive(driver, rng)
        totals.update(driver.seen)

    one()
    assert all(totals[what] for what in ("hits", "swapped out", "swapped in", "recomputed")), totals


def test_a_stale_sequence_is_refused_before_its_step() -> None:
    scheduler = make_scheduler(options=CacheOptions(reuse=False))
    sequence = make_sequence("a", 10)
    scheduler.add(sequence)
    run(scheduler)
    sequence.computed -= 1
    ((failed, error),) = scheduler.schedule().failed
    assert failed is sequence
    assert str(error) == (
        "slot 1 of ['a/0'] (generation 1) holds states after 10 tokens; expected 'a/0' (generation 1) after 9 tokens"
    )


def lose_a_page(scheduler: Scheduler) -> None:
    scheduler.caches.pools[0].free.pop()


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.caches.slots.free.remove(5)


def lose_a_sequence(scheduler: Scheduler) -> None:
    scheduler.running.clear()


def lose_the_first_row(scheduler: Scheduler) -> None:
    scheduler.caches._rows.remove(1)


def lose_the_last_row(scheduler: Scheduler) -> None:
    scheduler.caches._rows.remove(7)


def lose_swapped_bytes(scheduler: Scheduler) -> None:
    scheduler.caches.swap.used += 3


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (lose_a_page, ["page 3 of group 'full' is in 0 of: the free list, the cache, a sequence"]),
        (lose_a_slot, ["slot 5 is in 0 of: the free list, the snapshots, a sequence"]),
        (
            lose_a_sequence,
            [
                "page 1 of group 'full' is held by 'a/0', which is gone",
                "1 pages of group 'full' are promised, which does not add up",
                "slot 1 is held by 'a/0', which is gone or has another one",
                "the rows of block tables are damaged: [1, 2, 3, 4, 5, 6, 7]",
            ],
        ),
        (lose_the_first_row, ["the rows of block tables are damaged: [0, 2, 3, 4, 5, 6, 7]"]),
        (lose_the_last_row, ["the rows of block tables are damaged: [0, 1, 2, 3, 4, 5, 6]"]),
        (lose_swapped_bytes, ["3 bytes are swapped out, sequences that wait have 0"]),
    ],
)
def test_leaks_are_named(damage: Callable[[Scheduler], None], messages: list[str]) -> None:
    scheduler = make_scheduler(pages=5)
    scheduler.add(make_sequence("a", 8, 2))
    run(scheduler)
    scheduler.check_integrity()
    damage(scheduler)
    with pytest.raises(RuntimeError, match=r"^caches are damaged: ") as error:
        scheduler.check_integrity()
    assert all(message in str(error.value) for message in messages), error.value


def test_only_the_first_faults_are_named() -> None:
    scheduler = make_scheduler(pages=65)
    scheduler.caches.pools[0].free.clear()
    with pytest.raises(RuntimeError, match=r"page 20 of .*; and 44 more$"):
        scheduler.check_integrity()


def test_what_is_pending_goes_over_from_the_prompt_to_the_outputs_and_drafts() -> None:
    sequence = make_sequence("a", 3, 9, text=0)
    for token in (7, 8, 9):
        assert sequence.append(token, 0.0, (), True) is None
    sequence.drafts = [5, 6]
    assert sequence.pending(8).tolist() == [0, 1, 2, 7, 8, 9, 5, 6]
    for computed, expected in ((1, [1, 2, 7]), (2, [2, 7, 8]), (3, [7, 8, 9]), (5, [9, 5, 6])):
        sequence.computed = computed
        assert sequence.pending(3).tolist() == expected
    assert [sequence.tokens(stop).tolist() for stop in (2, 5)] == [[0, 1], [0, 1, 2, 7, 8]]


def test_a_plan_without_those_who_were_preempted() -> None:
    plan = Plan(singles=2)
    for i, name in enumerate("abcd"):
        plan.add(make_sequence(name), i + 1, i)
        plan.sequences[i].row = i
    plan.sequences[0].row = plan.sequences[2].row = -1
    plan.leave_out_preempted()
    assert [sequence.request.id for sequence in plan.sequences] == ["b", "d"]
    assert (plan.counts, plan.logits, plan.singles, plan.num_tokens) == ([2, 4], [1, 3], 1, 6)


@pytest.mark.parametrize(
    ("field", "least"), [("max_batch_size", 1), ("max_num_tokens", 1), ("max_chunk", 1), ("max_draft_tokens", 0)]
)
def test_limits_have_least_values(field: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={least - 1} is less than {least}"):
        Limits(**{"max_batch_size": 1, "max_num_tokens": 1, field: least - 1})


def test_pools_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_slots=1: slot 0 is reserved"):
        make_scheduler(slots=1)
    with pytest.raises(ValueError, match=r"num_pages=1 of page group 'full': page 0 is reserved"):
        make_scheduler(pages=1)
    with pytest.raises(ValueError, match="swap_bytes=-1 is negative"):
        make_scheduler(options=CacheOptions(swap_bytes=-1))
