"""The scheduler: budgets, order, admission and accounts. No tensors, no runner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from null_runner import null_info
from schedulers import UTILIZE, commit, make_scheduler, make_sequence, run, waiting

from hybridtrt.runtime.cache_manager import CacheOptions
from hybridtrt.runtime.rows import Rows
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler


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
    assert sorted(slots.tokens[list(slots._snapshots.values())]) == [12, 20]


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


@pytest.mark.parametrize(("field", "number"), [("generations", 2), ("tokens", 9), ("tokens", 11)])
def test_a_slot_that_is_another_ones_is_not_read_by_the_next_token(field: str, number: int) -> None:
    scheduler = make_scheduler(options=CacheOptions(reuse=False))
    sequence = make_sequence("a", 10)
    scheduler.add(sequence)
    run(scheduler)
    assert scheduler.caches.ready(scheduler.caches.rows.take(np.array([sequence.row]))) == [True]
    getattr(scheduler.caches.slots, field)[sequence.source] = number
    assert scheduler.caches.ready(scheduler.caches.rows.take(np.array([sequence.row]))) == [False]
    assert [failed for failed, _ in scheduler.schedule().failed] == [sequence]


def lose_a_page(scheduler: Scheduler) -> None:
    scheduler.caches.pools[0].free.pop()


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.caches.slots.free.remove(5)


def lose_a_sequence(scheduler: Scheduler) -> None:
    scheduler.running.clear()


def lose_the_first_row(scheduler: Scheduler) -> None:
    scheduler.caches.rows.free.remove(1)


def lose_the_last_row(scheduler: Scheduler) -> None:
    scheduler.caches.rows.free.remove(7)


def miscount_what_is_to_run(scheduler: Scheduler) -> None:
    scheduler.caches.rows.numbers.pending[0] += 1


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
        (miscount_what_is_to_run, ["row 0 has 2 tokens to run, 'a/0' has 1"]),
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
    Rows(1).enter(sequence, 0)
    for computed, expected in ((1, [1, 2, 7]), (2, [2, 7, 8]), (3, [7, 8, 9]), (5, [9, 5, 6])):
        sequence.computed = computed
        assert sequence.pending(3).tolist() == expected
    assert [sequence.tokens(0, stop).tolist() for stop in (2, 5)] == [[0, 1], [0, 1, 2, 7, 8]]
    assert [sequence.tokens(start, 5).tolist() for start in (2, 3, 4)] == [[2, 7, 8], [7, 8], [8]]


def test_a_plan_without_those_who_were_preempted() -> None:
    plan, rows = Plan(singles=2), Rows(4)
    for i, name in enumerate("abcd"):
        plan.add(make_sequence(name), i + 1, i)
        rows.enter(plan.sequences[i], 0)
    plan.rows = np.array([sequence.row for sequence in plan.sequences[:2]])
    rows.leave(plan.sequences[0])
    rows.leave(plan.sequences[2])
    plan.leave_out_preempted()
    assert [sequence.request.id for sequence in plan.sequences] == ["b", "d"]
    assert (plan.counts, plan.logits, plan.singles, plan.num_tokens) == ([2, 4], [1, 3], 1, 6)
    assert plan.rows.tolist() == [plan.sequences[0].row]


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
