"""What an engine does beside plain answers: forks, ends and preemption at any point, drafts, broken runners."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_run import Answer, lone_answer
from null_runner import NullRunner, lone_logits, null_info
from tokenizers_for_tests import byte_level, wrapped

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.request import Output, Request, SamplingParams
from hybridtrt.runtime.result import Result, join
from hybridtrt.runtime.runner import Costs, RunnerInfo
from hybridtrt.runtime.scheduler import Plan
from hybridtrt.runtime.tokenizer import Tokenizer

SWAPPING, RECOMPUTING = Costs(seconds_per_token=1.0), Costs(seconds_per_token=1e-12)
INFO = null_info()
LAYOUTS: dict[str, RunnerInfo] = {
    "states": INFO,
    "window": null_info(windows={"window": 6}),
    "no states": null_info(windows={"window": 6}, states=False),
    "states alone": null_info(num_pages={}),
}
EXPECTED: dict[tuple[Request, str], list[Answer]] = {}  # of lone runs


def ask(name: str, prompt: Iterable[int] = range(1, 11), **params: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"max_tokens": 8, "seed": 5} | params))


def lone(request: Request, info: RunnerInfo = INFO) -> list[Answer]:
    """All answers of a request as it gets them alone."""
    key = (request, repr(info))
    if key not in EXPECTED:
        EXPECTED[key] = [
            lone_answer(request, i, info, lambda history: lone_logits(history, info)) for i in range(request.params.n)
        ]
    return EXPECTED[key]


class Client:
    """Collects outputs by request and answer, and checks each one's place."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parts: dict[str, dict[int, list[Output]]] = defaultdict(lambda: defaultdict(list))

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            parts = self.parts[output.request_id][output.index]
            assert not parts or parts[-1].finish_reason is None, "an answer goes on after its end"
            parts.append(output)
        self.engine.check_integrity()
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        statistics = self.engine.statistics()
        assert statistics["running"] == statistics["waiting"] == statistics["slots"]["used"] == 0
        assert statistics["swap_used"] == 0
        assert all(usage["used"] == usage["promised"] == 0 for usage in statistics["pages"].values())

    def results(self, name: str) -> list[Result]:
        return [join(parts) for _, parts in sorted(self.parts[name].items())]

    def is_lone(self, request: Request) -> bool:
        """Whether all answers are complete and those of the lone request."""
        expected = lone(request, self.engine.info)
        return [answer_of(result) for result in self.results(request.id)] == expected


def answer_of(result: Result) -> Answer:
    return Answer(
        list(result.token_ids),
        list(result.log_probs),
        list(result.top_log_probs),
        list(result.prompt_log_probs),
        result.finish_reason,
    )


def start(engine: Engine, *requests: Request) -> Client:
    for request in requests:
        engine.submit(request)
    return Client(engine)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**{"poison": True} | changes)


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
    assert client.engine.statistics()["prefill_tokens"] == 10
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


TIGHT = replace(null_info(vocab_size=20, max_num_tokens=8, num_pages={"full": 11}, num_slots=9), costs=SWAPPING)
TARGET = ask("target", range(1, 12), n=3, temperature=1.5, max_tokens=9, stream_interval=50, return_log_probs=True)
OTHERS = (
    ask("beside", (4, 4, 4), max_tokens=30, return_log_probs=True),
    ask("later", (5, 5, 5, 5, 5), max_tokens=12, temperature=1.0),
)


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


def preempt(engine: Engine, name: str) -> None:
    """Between two steps."""
    plan = Plan()
    engine._scheduler.preempt(engine._scheduler.running[name], plan)
    engine._executor.run(plan)


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


TOKENIZER = Tokenizer(wrapped(byte_level()))
TEXT_INFO = null_info(vocab_size=420, eos_token_ids=(1,))  # as many tokens as the tokenizer has


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


class Broken(NullRunner):
    """Fails at some call of one method."""

    def __init__(self, info: RunnerInfo, method: str, call: int) -> None:
        super().__init__(info)
        self.method, self.left, self.broke = method, call, False

    def _count(self, method: str) -> None:
        if method == self.method and not self.broke:
            self.left -= 1
            if self.left < 0:
                self.broke = True
                raise OSError(f"{method} is broken\nand more")

    def clear_slots(self, slots: Sequence[int]) -> None:
        self._count("clear_slots")
        super().clear_slots(slots)

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._count("copy_pages")
        super().copy_pages(copies)

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Any:
        self._count("save")
        return super().save(pages, slots)

    def restore(self, saved: Any, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        self._count("restore")
        super().restore(saved, pages, slots)

    def step(self, batch: StepBatch) -> Any:
        self._count("step")
        return super().step(batch)


@pytest.mark.parametrize("method", ["clear_slots", "copy_pages", "save", "restore", "step"])
def test_a_runner_that_fails_ends_those_concerned_and_no_others(method: str) -> None:
    info = TIGHT if method in ("save", "restore") else null_info(vocab_size=20, max_num_tokens=8)
    requests = (*OTHERS, TARGET, replace(TARGET, id="again"))
    broke = 0
    for call in range(4):
        runner = Broken(info, method, call)
        engine = Engine(runner, options=options(policy="max_utilization", swap_bytes=1000, enable_block_reuse=False))
        concerned = watch(engine)
        client = start(engine, *requests)
        while engine.has_work:
            had_broken = runner.broke
            outputs = client.step()
            failed = {f"{output.request_id}/{output.index}" for output in outputs if output.finish_reason == "error"}
            if had_broken == runner.broke:
                assert not failed
                continue
            broke += 1
            assert all(output.error == f"OSError: {method} is broken" for output in outputs if output.error)
            if method == "copy_pages":
                (follower,) = failed
                assert not follower.endswith("/0")
            else:
                assert failed == concerned
        client.run()
        for request in requests:
            for result, expected in zip(client.results(request.id), lone(request, info), strict=True):
                assert answer_of(result) == expected or result.finish_reason == "error"
                assert list(result.token_ids) == expected.token_ids[: len(result.token_ids)]
    assert broke >= 2


def watch(engine: Engine) -> set[str]:
    """The names of the answers in the last plan, and of those that begin with the prompt of one of them."""
    names: set[str] = set()
    schedule: Callable[[], Plan] = engine._scheduler.schedule

    def watched() -> Plan:
        plan = schedule()
        names.clear()
        for sequence in (*plan.sequences, *plan.swapped_out):
            names.update(answer.name for answer in (sequence, *sequence.followers))
        return plan

    engine._scheduler.schedule = watched  # type: ignore[method-assign]
    return names
