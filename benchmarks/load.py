"""Requests that arrive over time, and what they wait, by the clock or by one that a simulation moves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from harness import percentile, random_engine, timer
from numpy.typing import NDArray

from hybridtrt.build.engine import BuildConfig
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Output, Request, SamplingParams
from hybridtrt.runtime.runner import Runner


class Clock:
    """Seconds that pass. Where they are CPU time, those that nobody works in pass without sleeping."""

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._skipped = 0.0

    def __call__(self) -> float:
        return self._seconds() + self._skipped

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        if self._seconds is time.perf_counter:
            time.sleep(seconds)
        else:
            self._skipped += seconds


class WatchedRunner:
    """A runner that notes when each request first runs and how many rows a step has.

    A request is known by the first token of its prompt, so those must differ.
    """

    def __init__(self, runner: Runner, clock: Clock | None = None) -> None:
        self.runner = runner
        self.clock = clock or Clock()
        self.first_run: dict[int, float] = {}
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        for row in np.nonzero(batch.context_lens == 0)[0]:
            self.first_run.setdefault(int(batch.input_ids[batch.cu_seqlens[row]]), self.clock())
        self.rows.append(batch.num_sequences)
        return self.runner.step(batch)

    def close(self) -> None:
        """The runner goes on to the next engine."""


@contextmanager
def random_runner(limits: BuildConfig, threads: int, cached_tokens: int | None = None) -> Iterator[WatchedRunner]:
    """A runner of a random model, with pages for so many tokens in each group or for all that may come."""
    with random_engine(limits) as engine_dir:
        runner = load_runner(engine_dir, RuntimeOptions(threads=threads, kv_cache_tokens=cached_tokens))
        watched = WatchedRunner(runner, Clock(timer(threads)))
        yield watched
        watched.runner.close()


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
    """What requests waited, in seconds since their arrivals, and what they got.

    With `useful` a request counts as finished after so many tokens, and its further ones do not count.
    """

    came: Mapping[str, float]
    useful: Callable[[str], int] | None = None
    queue: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # of the whole run
    rows: list[int] = field(default_factory=list)  # of each step

    def take(self, output: Output, now: float) -> None:
        """Count an output. Raises `RuntimeError` if its request failed."""
        if output.error:
            raise RuntimeError(f"{output.request_id}: {output.error}")
        name, waited = output.request_id, now - self.came[output.request_id]
        self.given[name] += len(output.token_ids)
        self.first_token.setdefault(name, waited)
        if output.ends_request or (self.useful and self.given[name] >= self.useful(name)):
            self.latency.setdefault(name, waited)

    @property
    def tokens(self) -> int:
        return sum(min(count, self.useful(name)) if self.useful else count for name, count in self.given.items())

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


def all_that_came(waiting: Sequence[Arrival], engine: Engine) -> list[Request]:
    """What in-flight batching submits."""
    return [arrival.request for arrival in waiting]


def run(
    engine: Engine,
    watched: WatchedRunner,
    arrivals: Sequence[Arrival],
    choose: Callable[[Sequence[Arrival], Engine], list[Request]] = all_that_came,
    useful: Callable[[str], int] | None = None,
) -> Times:
    """Run arrivals to their ends. `choose` says, before each step, which of those that wait are submitted."""
    times = Times({arrival.request.id: arrival.at for arrival in arrivals}, useful)
    watched.first_run, watched.rows = {}, times.rows
    coming, waiting, clock = list(arrivals), list[Arrival](), watched.clock
    started = clock()
    while coming or waiting or engine.has_work:
        now = clock() - started
        while coming and coming[0].at <= now:
            waiting.append(coming.pop(0))
        chosen = {request.id: request for request in choose(waiting, engine)}
        waiting = [arrival for arrival in waiting if arrival.request.id not in chosen]
        for request in chosen.values():
            engine.submit(request)
        if engine.has_work:
            outputs = engine.step()
            for output in outputs:
                times.take(output, clock() - started)
        else:
            clock.sleep(max(coming[0].at - now, 0))
    times.seconds = clock() - started
    for arrival in arrivals:
        first = watched.first_run[arrival.request.prompt_ids[0]]
        times.queue[arrival.request.id] = first - started - arrival.at
    return times


def at_once(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, all there from the start."""
    return [replace(arrival, at=0.0) for arrival in arrivals]
