"""Ends of requests at any point of their lives: cancelled, late, or with a complete guide."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from clients import INFO, OTHERS, TARGET, TIGHT, ask, lone, options, start
from null_runner import NullRunner, null_info
from schedulers import RECOMPUTING, SWAPPING
from tokenizers_for_tests import byte_level, kept

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.guided import Guide
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import Costs
from hybridtrt.runtime.tokenizer import Tokenizer

TOKENIZER = Tokenizer(kept(byte_level()))
TEXT_INFO = null_info(vocab_size=420, eos_token_ids=(1,))  # as many tokens as the tokenizer has


def situations(engine: Engine) -> set[str]:
    """Where the answers of the target stand."""
    found = set()
    for sequence in engine._requests.get("target", ()):
        if sequence.swapped is not None:
            found.add("swapped out")
        elif not sequence.running:
            found.add("waits" if sequence.times.scheduled is None else "waits again")
        else:
            found.add("decodes" if sequence.output_ids else "prefills")
        if sequence.followers:
            found.add("leads")
    return found


@pytest.mark.parametrize("how", ["cancelled", "timed_out"])
@pytest.mark.parametrize("costs", [SWAPPING, RECOMPUTING], ids=["swapping", "recomputing"])
def test_a_request_ends_at_any_point_of_its_life(how: str, costs: Costs) -> None:
    """It gets all that was sampled for it, everything is given back, and the others do not notice."""
    info, seen = replace(TIGHT, costs=costs), set()
    for steps in range(60):
        now = 0.0
        allotted = steps * 1000 + 500 if how == "timed_out" else None
        engine = Engine(
            NullRunner(info),
            options=options(policy="max_utilization", swap_bytes=1000, enable_block_reuse=False),
            clock=lambda: now,  # noqa: B023
        )
        client = start(engine, OTHERS[0], replace(TARGET, allotted_time_ms=allotted), OTHERS[1])
        for _ in range(steps):
            now += 1
            client.step()
        if how == "cancelled":
            engine.cancel("target")
        now += 1
        unfinished = {
            sequence.answer.index: len(sequence.output_ids) for sequence in engine._requests.get("target", ())
        }
        seen |= situations(engine)
        ends = {output.index: output for output in client.step() if output.request_id == "target"}
        assert "target" not in engine._requests
        for index, count in unfinished.items():
            assert ends[index].finish_reason == how
            assert ends[index].ends_request == (index == max(unfinished))
            assert len(ends[index].token_ids) == len(ends[index].log_probs) == count
        for result, expected in zip(client.results("target"), lone(TARGET, info), strict=True):
            assert list(result.token_ids) == expected.token_ids[: len(result.token_ids)]
        client.run()
        assert all(map(client.is_lone, OTHERS))
        if not unfinished:
            break
    waits = {"swapped out"} if costs is SWAPPING else {"waits again"}
    assert seen == {"waits", "leads", "prefills", "decodes"} | waits


def test_a_late_cancellation_does_not_reach_the_next_request_of_its_id() -> None:
    def cancel(batch: StepBatch) -> None:
        engine.cancel("a")

    runner = NullRunner(INFO)
    engine = Engine(runner, options=options())
    client = start(engine, ask("a", (1, 2), max_tokens=1))
    runner.on_step = cancel
    assert [output.finish_reason for output in client.step()] == ["length"]
    runner.on_step = None
    client.parts.clear()
    again = ask("a", max_tokens=4)
    engine.submit(again)
    client.run()
    assert client.is_lone(again)


def test_a_deadline_does_not_reach_the_next_request_of_its_id() -> None:
    now = 0.0
    engine = Engine(NullRunner(INFO), options=options(), clock=lambda: now)
    client = start(engine, replace(ask("a", max_tokens=1), allotted_time_ms=1000))
    client.run()
    client.parts.clear()
    again = ask("a", max_tokens=4)
    engine.submit(again)
    now = 2.0
    client.run()
    assert client.is_lone(again)


@pytest.mark.parametrize("how", ["cancelled", "timed_out"])
@pytest.mark.parametrize("interval", [1, 3, 50])
def test_an_answer_that_is_cut_off_has_the_text_of_all_its_tokens(how: str, interval: int) -> None:
    """Also what was held back because a stop word might have come."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, stream_interval=interval, ignore_eos=True)
    for count in range(1, 9):
        request = Request("a", (5, 6), replace(params, max_tokens=count))
        (whole,) = Engine(NullRunner(TEXT_INFO), TOKENIZER).generate([request])
        now = 0.0
        engine = Engine(NullRunner(TEXT_INFO), TOKENIZER, options(), clock=lambda: now)  # noqa: B023
        request = Request("a", (5, 6), replace(params, stop_words=(whole.text + "☃",)))
        client = start(engine, replace(request, allotted_time_ms=1000 if how == "timed_out" else None))
        for _ in range(count):
            client.step()
        if how == "cancelled":
            engine.cancel("a")
        now = 1.0
        client.step()
        (result,) = client.results("a")
        assert (result.finish_reason, result.token_ids, result.text) == (how, whole.token_ids, whole.text)


def test_masks_are_begun_before_the_step_and_waited_for_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def watch(name: str) -> None:
        method = getattr(Guide, name)
        monkeypatch.setattr(Guide, name, lambda guide: (events.append(name), method(guide))[1])

    watch("start")
    watch("mask")
    engine = Engine(NullRunner(TEXT_INFO, on_step=lambda batch: events.append("step")), TOKENIZER)
    params = SamplingParams(max_tokens=4, guide_type="regex", guide="[a-z]{9}", min_tokens=4)
    engine.generate([Request("a", (5, 6), params)])
    assert events == ["start", "step", "mask"] * 4
    engine.close()


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_answer_ends_when_its_guide_is_complete(ignore_eos: bool) -> None:
    expression = "(red|green|blue)( and (red|green|blue)){2}!"
    params = SamplingParams(
        max_tokens=50, temperature=1.0, seed=3, n=3, guide_type="regex", guide=expression, ignore_eos=ignore_eos
    )
    engine = Engine(NullRunner(TEXT_INFO), TOKENIZER, options(max_draft_tokens=3))
    client = start(engine, Request("a", (5, 6), params), ask("beside", (5, 6)))
    client.run()
    results = client.results("a")
    assert all(re.fullmatch(expression, result.text) for result in results), results
    assert {result.finish_reason for result in results} == {"stop"}
    assert len({result.text for result in results}) > 1
    assert client.results("beside")[0].token_ids == tuple(lone(ask("beside", (5, 6)), TEXT_INFO)[0].token_ids)
    engine.close()
