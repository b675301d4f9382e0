"""Several answers of one request: they share its prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clients import INFO, LAYOUTS, ask, lone, options, start
from null_runner import NullRunner, null_info
from schedulers import make_scheduler, make_sequence, run, waiting

from hybridtrt.runtime.cache_manager import CacheOptions
from hybridtrt.runtime.engine import Engine


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_prompt_of_several_answers_is_run_once_and_shared(layout: str) -> None:
    info = LAYOUTS[layout]
    request = ask("a", n=4, temperature=1.5, return_log_probs=True)
    client = start(Engine(NullRunner(info), options=options(enable_block_reuse=False)), request)
    client.step()
    statistics = client.engine.statistics()
    assert (statistics["running"], statistics["prefill_tokens"]) == (4, 10)
    if "full" in info.num_pages:
        assert statistics["pages"]["full"]["used"] == 2 + 4  # two full pages, and what each answer will write to
    if client.engine._caches.slots is not None:
        assert statistics["slots"]["used"] == 1 + 4  # the states after the prompt, and each one's own
    client.run()
    assert client.is_lone(request)
    statistics = client.engine.statistics()
    assert statistics["prefill_tokens"] == 10
    assert sum(statistics["histograms"]["queue"]["counts"]) == 4
    assert len({result.token_ids for result in client.results("a")}) == 4


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(
    "size",
    [{"max_batch_size": 2}, {"num_slots": 2}, {"num_slots": 4}, {"num_pages": {"full": 6}}, {"max_num_tokens": 2}],
)
def test_answers_without_room_beside_the_others_wait(size: dict[str, Any], reuse: bool) -> None:
    info = null_info(**size)
    request = ask("a", n=4, temperature=1.5, prompt_log_probs=1)
    client = start(Engine(NullRunner(info), options=options(enable_block_reuse=reuse)), request)
    client.run()
    assert client.is_lone(request)


def test_an_answer_says_whether_others_of_its_request_go_on() -> None:
    request = ask("a", n=3, temperature=2.0, max_tokens=30, stop_token_ids=tuple(range(5)))
    client = start(Engine(NullRunner(INFO), options=options()), request)
    client.run()
    lengths = [len(answer.token_ids) for answer in lone(request)]
    ends = [parts[-1] for parts in client.parts["a"].values()]
    assert len(set(lengths)) == 3
    assert [output.more for output in sorted(ends, key=lambda output: lengths[output.index])] == [True, True, False]
    assert client.is_lone(request)


def test_answers_go_on_when_the_first_one_ends_at_once() -> None:
    request = ask("a", (1, 2, 3), n=3, temperature=2.0)
    first = lone(request)[0].token_ids[0]
    request = replace(request, params=replace(request.params, stop_token_ids=(first,)))
    client = start(Engine(NullRunner(INFO), options=options()), request)
    client.step()
    assert client.engine.statistics()["running"] == 2
    client.run()
    assert client.is_lone(request)
