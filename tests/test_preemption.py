"""Who is preempted, what is kept of it, and that its answer does not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clients import LAYOUTS, ask, options, preempt, start
from null_runner import NullRunner, null_info
from schedulers import RECOMPUTING, SWAPPING, UTILIZE, Drafter, commit, make_scheduler, make_sequence, run, waiting

from hybridtrt.runtime.cache_manager import CacheOptions
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.runner import Costs
from hybridtrt.runtime.scheduler import Plan, Scheduler
from hybridtrt.runtime.swap import Swapped, SwapSpace


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
    assert sequence.drafts == []
    assert sequence.swapped is not None
    assert sequence.swapped.num_bytes == 16 + 4
    scheduler.caches.pools[0].take(scheduler.caches.pools[0].open("other"), 4)
    assert run(scheduler) == {"a": 1}


def test_swap_space_is_bounded() -> None:
    space, swapped = SwapSpace(10), Swapped(0, {}, [], [], 6)
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


def test_those_of_lower_priority_make_room() -> None:
    info = replace(null_info(num_pages={"full": 9}), costs=RECOMPUTING)
    engine = Engine(NullRunner(info), options=options(policy="max_utilization", enable_block_reuse=False))
    requests = [replace(ask(name, (1, 2), max_tokens=25), priority=0.1) for name in ("low", "lower")]
    requests.append(replace(ask("high", (1, 2), max_tokens=25), priority=1.0))
    client = start(engine, *requests[:2])
    client.step()
    engine.submit(requests[2])
    order = []
    while engine.has_work:
        order += [output.request_id for output in client.step() if output.finish_reason]
    assert order == ["high", "low", "lower"]
    assert all(map(client.is_lone, requests))
    assert engine.statistics()["preempted_recompute"] > 0


@pytest.mark.parametrize("layout", ["states", "window", "no states"])
@pytest.mark.parametrize("costs", [SWAPPING, RECOMPUTING], ids=["swapping", "recomputing"])
def test_an_answer_that_is_preempted_at_any_point_goes_on_as_if_it_were_not(layout: str, costs: Costs) -> None:
    info = replace(LAYOUTS[layout], costs=costs, vocab_size=20)
    request = ask(
        "a",
        [1, 2, 3] * 5,
        max_tokens=12,
        temperature=0.7,
        n=2,
        top_log_probs=1,
        prompt_log_probs=2,
        frequency_penalty=0.1,
    )
    done = 0
    for index, name in enumerate(("a/0", "a/1")):
        for steps in range(1 + index, 22, 2):
            engine = Engine(NullRunner(info), options=options(swap_bytes=10_000, max_chunk=4, max_draft_tokens=3))
            client = start(engine, request)
            for _ in range(steps):
                if engine.has_work:
                    client.step()
            if name in engine._scheduler.running:
                preempt(engine, name)
                done += 1
            client.run()
            assert client.is_lone(request), (name, steps)
    assert done > 10
