"""Requests that arrive over time, and what they wait: the engine is stepped, the clock is the real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from harness import percentile
from numpy.typing import NDArray

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import Runner


class WatchedRunner:
    """A runner that notes when each request first runs, how many rows a step has and how long steps take.

    A request is known by the first token of its prompt, so those must differ.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.first_run: dict[int, float] = {}
        self.rows: list[int] = []
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        started = time.perf_counter()
        for row in np.nonzero(batch.context_lens == 0)[0]:
            self.first_run.setdefault(int(batch.input_ids[batch.cu_seqlens[row]]), started)
        logits = self.runner.step(batch)
        self.rows.append(batch.num_sequences)
        self.seconds += time.perf_counter() - started
        return logits

    def close(self) -> None:
        """The runner goes on to the next engine."""


@dataclass(frozen=True)
class Arrival:
    """A request and the second at which it comes."""

    at: float
    request: Request


def poisson(requests: Iterable[Request], rate: float, seed: int = 0) -> list[Arrival]:
    """Arrivals with exponential gaps, `rate` requests a second."""
    requests = list(requests)
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(requests)))
    return [Arrival(float(at), request) for at, request in zip(times - times[0], requests, strict=True)]


def mixed_requests(
    count: int, prompts: tuple[int, int], outputs: tuple[int, int], vocab_size: int, seed: int = 0, **params: Any
) -> list[Request]:
    """Random prompts of lengths spread evenly between two bounds, and so their outputs; first tokens differ."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt = rng.integers(0, vocab_size, rng.integers(prompts[0], prompts[1] + 1))
        prompt[0] = i
        options = SamplingParams(max_tokens=int(rng.integers(outputs[0], outputs[1] + 1)), seed=i, **params)
        requests.append(Request(f"request-{i}", tuple(prompt.tolist()), options))
    return requests


@dataclass
class Times:
    """Seconds by request, since its arrival."""

    queue: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0  # of the whole run
    rows: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Tokens a second, queue times and latencies in seconds, mean rows of a step."""
        queue, latency = list(self.queue.values()), list(self.latency.values())
        return {
            "tokens/s": self.tokens / self.seconds,
            "queue mean s": float(np.mean(queue)),
            "queue P99 s": percentile(queue, 99),
            "first token mean s": float(np.mean(list(self.first_token.values()))),
            "latency P50 s": percentile(latency, 50),
            "latency P99 s": percentile(latency, 99),
            "rows a step": float(np.mean(self.rows)),
        }


def run(
    engine: Engine,
    watched: WatchedRunner,
    arrivals: Sequence[Arrival],
    choose: Callable[[list[Arrival], Engine], list[Request]] = lambda waiting, engine: [a.request for a in waiting],
    useful: Callable[[str], int] | None = None,
) -> Times:
    """Run arrivals to their ends. `choose` says which of those that came are submitted now, before each step.

    With `useful` a request counts as finished after so many tokens, and its further ones are not counted.
    """
    times, coming, waiting = Times(), list(arrivals), list[Arrival]()
    came = {arrival.request.id: arrival.at for arrival in arrivals}
    given = dict.fromkeys(came, 0)
    first_ids = {arrival.request.prompt_ids[0]: arrival.request.id for arrival in arrivals}
    watched.first_run, watched.rows = {}, []
    started = time.perf_counter()
    while coming or waiting or engine.has_work:
        now = time.perf_counter() - started
        while coming and coming[0].at <= now:
            waiting.append(coming.pop(0))
        submitted = choose(waiting, engine)
        ids = {request.id for request in submitted}
        waiting = [arrival for arrival in waiting if arrival.request.id not in ids]
        for request in submitted:
            engine.submit(request)
        if not engine.has_work:
            time.sleep(max(coming[0].at - now, 0))
            continue
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            if output.error:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            name = output.request_id
            times.first_token.setdefault(name, now - came[name])
            given[name] += len(output.token_ids)
            if name not in times.latency and (output.ends_request or (useful and given[name] >= useful(name))):
                times.latency[name] = now - came[name]
    times.seconds = time.perf_counter() - started
    times.tokens = sum(min(count, useful(name)) if useful else count for name, count in given.items())
    times.queue = {
        first_ids[token]: at - started - came[first_ids[token]]
        for token, at in watched.first_run.items()
        if token in first_ids
    }
    times.rows = watched.rows
    return times


def at_once(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, all there from the start."""
    return [replace(arrival, at=0.0) for arrival in arrivals]
