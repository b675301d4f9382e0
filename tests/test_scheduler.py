"""The scheduler and the pools: budgets, order, reservation, records and accounts. No tensors, no runner."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import null_info

from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.slots import SlotPool


def make_scheduler(
    batch: int = 8, tokens: int = 32, chunk: int | None = None, pages: int = 65, slots: int = 9
) -> Scheduler:
    info = null_info(num_pages={"full": pages, "window": pages}, num_slots=slots)
    return Scheduler(Limits(batch, tokens, chunk), CacheManager(info))


def make_sequence(name: str, prompt: int = 5, max_tokens: int = 4) -> Sequence:
    return Sequence(Request(name, (1,) * prompt, SamplingParams(max_tokens)), np.ones(prompt, np.int32))


def run(scheduler: Scheduler) -> dict[str, int]:
    """One step that samples token 1 everywhere; returns the tokens that each request ran."""
    plan = scheduler.schedule()
    for sequence, count in zip(plan.sequences, plan.counts, strict=True):
        scheduler.caches.prepare(sequence, count)
    for sequence in scheduler.complete(plan):
        if sequence.append(1, 0.0).finish_reason:
            scheduler.remove(sequence)
    return dict(zip([sequence.id for sequence in plan.sequences], plan.counts, strict=True))


def test_decodes_come_first_and_chunks_fill_the_budget() -> None:
    scheduler = make_scheduler(tokens=10)
    scheduler.add(make_sequence("a", 3))
    scheduler.add(make_sequence("b", 2))
    assert run(scheduler) == {"a": 3, "b": 2}
    for name in "cde":
        scheduler.add(make_sequence(name, 6, 1))
    plan = scheduler.schedule()
    assert plan.decodes == 2
    assert [(sequence.id, count) for sequence, count in zip(plan.sequences, plan.counts, strict=True)] == [
        ("a", 1),
        ("b", 1),
        ("c", 6),
        ("d", 2),
    ]


def test_a_prefill_goes_on_before_a_new_one_is_admitted() -> None:
    scheduler = make_scheduler(tokens=4)
    scheduler.add(make_sequence("long", 10, 1))
    scheduler.add(make_sequence("next", 3, 1))
    assert [run(scheduler) for _ in range(4)] == [{"long": 4}, {"long": 4}, {"long": 2, "next": 2}, {"next": 1}]


@pytest.mark.parametrize(("chunk", "steps"), [(1, 7), (2, 4), (3, 3), (7, 1), (64, 1)])
def test_chunks_are_bounded_for_each_sequence(chunk: int, steps: int) -> None:
    scheduler = make_scheduler(chunk=chunk)
    scheduler.add(make_sequence("a", 7, 1))
    scheduler.add(make_sequence("b", 7, 1))
    counts = [run(scheduler) for _ in range(steps)]
    assert not scheduler.has_work
    assert all(count == {"a": min(chunk, 7), "b": min(chunk, 7)} for count in counts[:-1])


def test_one_token_that_is_left_of_the_budget_starts_a_prefill() -> None:
    scheduler = make_scheduler(tokens=6)
    scheduler.add(make_sequence("a", 5))
    scheduler.add(make_sequence("b", 5))
    plan = scheduler.schedule()
    assert (plan.counts, plan.decodes) == ([5, 1], 0)
    assert not plan.sequences[1].decoding


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


def test_nobody_overtakes_the_oldest_waiting_request() -> None:
    scheduler = make_scheduler(pages=6)  # 20 tokens
    scheduler.add(make_sequence("a", 8, 5))  # 3 pages
    scheduler.add(make_sequence("large", 14, 3))  # 4 pages, not yet
    scheduler.add(make_sequence("small", 1, 1))
    assert run(scheduler) == {"a": 8}
    assert list(scheduler.waiting) == ["large", "small"]
    while "a" in scheduler.running:
        assert set(run(scheduler)) == {"a"}
    assert run(scheduler) == {"large": 14, "small": 1}


def test_pages_are_reserved_at_admission_and_handed_out_as_needed() -> None:
    scheduler = make_scheduler(pages=11)
    scheduler.add(make_sequence("a", 5, 20))  # 24 tokens in the caches at most: 6 pages
    pool = scheduler.caches.pools[0]
    run(scheduler)
    assert (pool.used, pool.promised, len(pool.free)) == (2, 4, 8)
    scheduler.add(make_sequence("b", 5, 13))  # 5 pages, 4 are left
    run(scheduler)
    assert list(scheduler.waiting) == ["b"]
    for _ in range(2):
        run(scheduler)
    assert (pool.used, pool.promised) == (2, 4)
    run(scheduler)
    assert (pool.used, pool.promised) == (3, 3)


def test_a_request_that_fits_exactly_runs_to_its_end() -> None:
    scheduler = make_scheduler(pages=6)
    scheduler.caches.check_fits(20)
    scheduler.add(make_sequence("a", 10, 11))
    while scheduler.has_work:
        run(scheduler)
    scheduler.check_integrity()
    with pytest.raises(ValueError, match=r"21 tokens need 6 pages of 4 tokens, but page group 'full' has 5"):
        scheduler.caches.check_fits(21)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 20), batch=st.integers(1, 6), pages=st.integers(16, 40))
def test_budgets_hold_and_all_ends_whole(seed: int, tokens: int, batch: int, pages: int) -> None:
    rng = random.Random(seed)
    chunk = rng.choice([None, 1, 2, 3, 7])
    scheduler = make_scheduler(batch, tokens, chunk, pages)
    live: list[Sequence] = []
    for step in range(400):
        if step < 60 and rng.random() < 0.5:
            live.append(make_sequence(str(step), rng.randint(1, 40), rng.randint(1, 20)))
            scheduler.add(live[-1])
        if live and rng.random() < 0.05:
            scheduler.remove(rng.choice(live))
        if not scheduler.has_work:
            continue
        counts = run(scheduler)
        assert counts, "work is left and nothing runs"
        assert sum(counts.values()) <= tokens
        assert len(counts) <= batch
        scheduler.check_integrity()
        for pool in scheduler.caches.pools:
            assert pool.promised <= len(pool.free)
    while scheduler.has_work:
        assert run(scheduler)
    scheduler.check_integrity()
    assert all(pool.used == pool.promised == 0 for pool in scheduler.caches.pools)
    assert scheduler.caches.slots.used == 0


def test_slot_records_are_checked() -> None:
    slots = SlotPool(3)
    slot, generation = slots.take("a")
    slots.advance(slot, 5)
    slots.check(slot, "a", generation, 5)
    for owner, generation_, tokens in [("b", generation, 5), ("a", generation + 1, 5), ("a", generation, 4)]:
        with pytest.raises(
            RuntimeError, match=rf"slot {slot} holds 'a' \(generation 1\) after 5 tokens; expected '{owner}'"
        ):
            slots.check(slot, owner, generation_, tokens)
    assert slots.release(slot, "a", generation)
    assert slots.take("b") == (slot, generation + 1)
    with pytest.raises(RuntimeError, match="expected 'a'"):
        slots.check(slot, "a", generation, 5)
    assert not slots.release(slot, "a", generation)  # the late release of an owner that is gone
    slots.check(slot, "b", generation + 1, 0)


def test_a_stale_row_is_refused_before_its_step() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 10)
    scheduler.add(sequence)
    run(scheduler)
    sequence.computed -= 1
    with pytest.raises(RuntimeError, match=r"after 10 tokens; expected 'a' .* after 9 tokens"):
        scheduler.caches.prepare(sequence, 1)


def test_reserved_numbers_are_never_handed_out() -> None:
    pool, slots = PagePool("full", 5, 4), SlotPool(4)
    pool.reserve("a", 4)
    pool.take("a", 4)
    assert sorted(pool.release("a")) == [1, 2, 3, 4]
    assert sorted(slots.take(str(i))[0] for i in range(3)) == [1, 2, 3]


def test_a_pool_refuses_more_than_was_reserved() -> None:
    pool = PagePool("full", 5, 4)
    pool.reserve("a", 2)
    assert not pool.can_reserve(3)
    with pytest.raises(RuntimeError, match="3 pages of group 'full' cannot be reserved for 'b'"):
        pool.reserve("b", 3)
    with pytest.raises(RuntimeError, match="'a' takes 3 pages of group 'full' and has 2 reserved"):
        pool.take("a", 3)
    with pytest.raises(RuntimeError, match="'a' already holds"):
        pool.reserve("a", 1)


def test_leaks_are_named() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"))
    run(scheduler)
    scheduler.check_integrity()
    pool, slots = scheduler.caches.pools[1], scheduler.caches.slots
    held = scheduler.running["a"].pages["window"][0]
    lost = pool.free.pop()
    pool.free.append(held)
    slots.free.remove(5)
    with pytest.raises(RuntimeError) as error:
        scheduler.check_integrity()
    assert f"page {lost} of group 'window' is neither free nor held" in str(error.value)
    assert f"page {held} of group 'window' is in the free list and in 'a'" in str(error.value)
    assert "slot 5 is neither free nor held" in str(error.value)
    scheduler.running.clear()
    with pytest.raises(RuntimeError, match="slot 1 is held by 'a', which is gone"):
        scheduler.check_integrity()
    with pytest.raises(RuntimeError, match="pages of group 'full' are held by 'a', which is gone"):
        scheduler.check_integrity()


def test_what_is_pending_goes_over_from_the_prompt_to_the_outputs() -> None:
    sequence = make_sequence("a", 3, 9)
    for token in (7, 8, 9):
        sequence.append(token, 0.0)
    assert not sequence.decoding
    assert sequence.pending(6).tolist() == [1, 1, 1, 7, 8, 9]
    for computed, expected in ((2, [1, 7]), (3, [7, 8]), (4, [8, 9])):
        sequence.computed = computed
        assert sequence.pending(2).tolist() == expected
    sequence.computed = 5
    assert sequence.decoding


def test_a_plan_without_some_sequences() -> None:
    a, b, c = (make_sequence(name) for name in "abc")
    plan = Plan([a, b, c], [1, 1, 5], 2, [c]).without([a])
    assert (plan.sequences, plan.counts, plan.decodes, plan.admitted) == ([b, c], [1, 5], 1, [c])


@pytest.mark.parametrize("field", ["max_batch_size", "max_num_tokens", "max_chunk"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0 is not positive"):
        Limits(**{"max_batch_size": 1, "max_num_tokens": 1, field: 0})


def test_pools_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_slots=1: slot 0 is reserved"):
        CacheManager(null_info(num_slots=1))
    with pytest.raises(ValueError, match=r"num_pages=1 of page group 'full': page 0 is reserved"):
        CacheManager(null_info(num_pages={"full": 1}))
