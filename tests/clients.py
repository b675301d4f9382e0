"""Requests to an engine over a runner without a network, and what their clients see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lone_run import Answer, lone_answer
from null_runner import lone_logits, null_info
from schedulers import SWAPPING

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.request import Output, Request, SamplingParams
from hybridtrt.runtime.result import Result, join
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.scheduler import Plan

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


TIGHT = replace(null_info(vocab_size=20, max_num_tokens=8, num_pages={"full": 11}, num_slots=9), costs=SWAPPING)
TARGET = ask("target", range(1, 12), n=3, temperature=1.5, max_tokens=9, stream_interval=50, return_log_probs=True)
OTHERS = (
    ask("beside", (4, 4, 4), max_tokens=30, return_log_probs=True),
    ask("later", (5, 5, 5, 5, 5), max_tokens=12, temperature=1.0),
)


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
        token_ids=list(result.token_ids),
        text=result.text,
        log_probs=list(result.log_probs),
        top_log_probs=list(result.top_log_probs),
        prompt_log_probs=list(result.prompt_log_probs),
        finish_reason=result.finish_reason,
    )


def start(engine: Engine, *requests: Request) -> Client:
    for request in requests:
        engine.submit(request)
    return Client(engine)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**{"poison": True} | changes)


def preempt(engine: Engine, name: str) -> None:
    """Between two steps."""
    plan = Plan()
    engine._scheduler.preempt(engine._scheduler.running[name], plan)
    engine._executor.run(plan)
