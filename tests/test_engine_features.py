"""Log-probabilities of prompts, streams, priorities and hits, as clients see them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clients import INFO, LAYOUTS, ask, options, preempt, start
from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import NullRunner, null_info

from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Request
from hybridtrt.runtime.scheduler import MAX_LOGITS_ROWS


@pytest.mark.parametrize("chunk", [None, 1, 3, 4])
def test_the_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(chunk: int | None) -> None:
    request = ask("a", range(1, 24), prompt_log_probs=3, max_tokens=2)
    engine = Engine(NullRunner(null_info(max_num_tokens=8)), options=options(max_chunk=chunk))
    client = start(engine, ask("beside", prompt_log_probs=0), request, ask("short", (7,), prompt_log_probs=1))
    client.run()
    assert client.is_lone(request)
    assert len(client.parts["a"][0][0].prompt_log_probs) == 22, "they come with the first output"
    assert len(client.results("beside")[0].prompt_log_probs) == 9
    assert client.results("short")[0].prompt_log_probs == ()


def test_a_long_prompt_is_scored_a_part_a_step() -> None:
    """Each row of logits has as many floats as the vocabulary has tokens."""
    runner = NullRunner(null_info(max_num_tokens=200, max_seq_len=200))
    request = ask("a", [i % 50 for i in range(150)], prompt_log_probs=0)
    client = start(Engine(runner, options=options()), request)
    client.run()
    assert client.is_lone(request)
    assert max(len(batch.logits_indices) for batch in runner.batches) == MAX_LOGITS_ROWS


def test_prompts_that_are_scored_share_the_rows_of_logits() -> None:
    """Nobody waits for a row: each has one in every step. Drafts have theirs, too."""
    info = replace(null_info(4, 4, 200, 200, num_pages={"full": 201, "window": 201}, num_slots=13), max_logits_rows=40)
    runner = NullRunner(info)
    engine = Engine(runner, options=options(max_draft_tokens=4))
    scored = [ask(f"scored-{i}", [i, *range(3)] * 20, prompt_log_probs=0) for i in range(3)]
    client = start(engine, ask("a", [1, 2, 3] * 4, max_tokens=40), *scored, ask("b", [2, 1] * 20))
    client.run()
    assert all(client.is_lone(request) for request in scored)
    rows = [len(batch.logits_indices) for batch in runner.batches]
    assert max(rows) == 40
    assert all(batch.num_sequences == 4 for batch in runner.batches[:3])


def test_a_prompt_is_scored_in_full_whatever_is_cached_of_it() -> None:
    engine = Engine(NullRunner(INFO), options=options())
    request = ask("scored", range(1, 20), prompt_log_probs=1)
    client = start(engine, ask("cold", range(1, 20)))
    client.run()
    engine.submit(request)
    client.run()
    engine.submit(ask("warm", range(1, 20)))
    client.run()
    assert client.is_lone(request)
    assert engine.statistics()["hit_tokens"] == 16


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 8), (2, [2] * 4), (3, [3, 3, 2]), (8, [8]), (50, [8])])
def test_outputs_have_as_many_tokens_as_the_stream_interval(interval: int, sizes: list[int]) -> None:
    request = ask("a", stream_interval=interval, return_log_probs=True, top_log_probs=2)
    client = start(Engine(NullRunner(INFO), options=options()), request)
    client.run()
    parts = client.parts["a"][0]
    assert [len(output.token_ids) for output in parts if output.token_ids] == sizes
    assert all(len(part.log_probs) == len(part.top_log_probs) == len(part.token_ids) for part in parts)
    assert client.is_lone(request)


def finishing_order(engine: Engine, *arrivals: tuple[float, Request], clock: list[float]) -> list[str]:
    for at, request in arrivals:
        clock[0] = at
        engine.submit(request)
    outputs = [output for _ in range(100) for output in engine.step()]
    return [output.request_id for output in outputs if output.ends_request]


@pytest.mark.parametrize(
    ("priority", "waited", "order"),
    [(0.5, 1.0, ["new", "old"]), (0.5, 29.0, ["new", "old"]), (0.5, 31.0, ["old", "new"]), (0.0, 0.0, ["old", "new"])],
)
def test_waiting_counts_against_priority(priority: float, waited: float, order: list[str]) -> None:
    clock = [0.0]
    engine = Engine(
        NullRunner(null_info(max_batch_size=1)), options=options(priority_seconds=60), clock=lambda: clock[0]
    )
    old, new = replace(ask("old"), priority=0.0), replace(ask("new"), priority=priority)
    assert finishing_order(engine, (0.0, old), (waited, new), clock=clock) == order


def test_hits_are_counted_once_a_request() -> None:
    engine = Engine(NullRunner(INFO), options=options())
    client = start(engine, ask("cold", range(18)))
    client.run()
    assert engine.statistics()["hit_rate"] == 0
    engine.submit(ask("warm", range(22), n=3))
    client.step()
    assert engine.statistics()["prefill_tokens"] == 18 + 6
    preempt(engine, "warm/0")
    client.run()
    statistics = engine.statistics()
    assert (statistics["lookup_tokens"], statistics["hit_tokens"]) == (40, 16)
    assert statistics["hit_rate"] == 16 / 40


STEMS = ((1, 2, 3, 4, 5, 6, 7) * 4, (9,) * 28)
PROMPTS = st.builds(
    lambda stem, cut, tail: (*stem[:cut], *tail),
    st.sampled_from(STEMS),
    st.integers(0, 24),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=8),
    layout=st.sampled_from(sorted(LAYOUTS)),
    interval=st.sampled_from([4, 8, 256]),
)
def test_reuse_changes_no_answer(prompts: list[tuple[int, ...]], layout: str, interval: int) -> None:
    requests = [
        ask(str(i), prompt, temperature=1.0, seed=i, n=1 + i % 2, return_log_probs=True)
        for i, prompt in enumerate(prompts)
    ]
    answers = []
    for reuse in (True, False):
        engine = Engine(
            NullRunner(LAYOUTS[layout]), options=options(enable_block_reuse=reuse, snapshot_interval=interval)
        )
        answers.append([result for request in requests for result in engine.generate([request])])
        engine.check_integrity()
    assert answers[0] == answers[1]
