"""Drafts: what they may take, and that they change no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clients import LAYOUTS, ask, options, start
from null_runner import NullRunner, null_info
from schedulers import Drafter, Driver, commit, make_scheduler, make_sequence, run

from hybridtrt.runtime.cache_manager import CacheOptions
from hybridtrt.runtime.engine import Engine


def test_drafts_take_what_nothing_else_wants_of_the_budget() -> None:
    scheduler = make_scheduler(tokens=8, drafts=4)
    scheduler.add(make_sequence("a", 3, 40, drafter=Drafter()))
    assert [run(scheduler) for _ in range(2)] == [{"a": 3}, {"a": 5}]
    scheduler.add(make_sequence("b", 19, 40))
    assert [run(scheduler) for _ in range(2)] == [{"a": 5, "b": 3}, {"a": 1, "b": 7}]


def test_tokens_that_run_again_come_before_drafts() -> None:
    scheduler = make_scheduler(tokens=6, drafts=4)
    scheduler.add(make_sequence("a", 3, 40, drafter=Drafter(wrong=True)))
    other = make_sequence("b", 3, 40, drafter=Drafter())
    scheduler.add(other)
    assert [run(scheduler) for _ in range(3)] == [{"a": 3, "b": 3}, {"a": 5, "b": 1}, {"a": 2, "b": 4}]
    assert len(other.output_ids) == 1 + 1 + 4


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_drafts_save_steps(layout: str) -> None:
    info = LAYOUTS[layout]
    request = ask("a", max_tokens=40, logit_bias=((3, 50.0),), return_log_probs=True)
    client = start(Engine(NullRunner(info), options=options(max_draft_tokens=4)), request)
    client.run()
    statistics = client.engine.statistics()
    assert client.is_lone(request)
    assert statistics["draft_tokens"] == statistics["accepted_draft_tokens"] > 20
    assert statistics["steps"] <= 20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_wrong_drafts_change_nothing(layout: str, temperature: float | None) -> None:
    info = replace(LAYOUTS[layout], vocab_size=3)
    requests = [
        ask(
            str(i),
            [i % 3, 1, 2],
            max_tokens=50,
            temperature=temperature,
            seed=i,
            logit_bias=((i % 3, 3.0),),
            n=1 + i % 2,
        )
        for i in range(6)
    ]
    client = start(Engine(NullRunner(info), options=options(max_draft_tokens=4)), *requests)
    client.run()
    assert all(map(client.is_lone, requests))
    statistics = client.engine.statistics()
    assert statistics["draft_tokens"] > statistics["accepted_draft_tokens"] > 0
