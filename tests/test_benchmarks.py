"""The benchmarks' own parts: what a trace counts, how static batches are padded, and loads that keep going."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from null_runner import NullRunner, null_info

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.request import Request, SamplingParams

NO_REUSE = EngineOptions(enable_block_reuse=False)
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import load

    return load


@pytest.fixture
def mixed_trace(load: ModuleType) -> ModuleType:
    import mixed_trace

    return mixed_trace


def test_a_trace_counts_tokens_and_waits(load: ModuleType) -> None:
    watched = load.WatchedRunner(NullRunner(null_info(max_batch_size=2, num_slots=5)))
    requests = load.mixed_requests(6, (2, 9), (3, 8), 50, ignore_eos=True)
    times = load.run(Engine(watched), watched, load.at_once(load.poisson(requests, 100.0)))
    assert times.tokens == sum(request.params.max_tokens for request in requests)
    names = {request.id for request in requests}
    assert set(times.queue) == set(times.first_token) == set(times.latency) == names
    assert all(0 <= times.queue[name] < times.first_token[name] <= times.latency[name] for name in names)
    assert max(times.rows) == 2
    assert sorted(times.queue, key=times.queue.__getitem__)[0] == "request-0"


def test_static_batches_are_padded_and_run_to_the_longest_output(load: ModuleType, mixed_trace: ModuleType) -> None:
    watched = load.WatchedRunner(NullRunner(null_info(max_batch_size=3, num_slots=7)))
    requests = [
        Request(f"{i}", (i, *range(length - 1)), SamplingParams(max_tokens=output, ignore_eos=True))
        for i, (length, output) in enumerate([(4, 2), (9, 5), (1, 3), (6, 4)])
    ]
    arrivals = load.at_once(load.poisson(requests, 100.0))
    engine = Engine(watched)
    batch = mixed_trace.static_batch(arrivals, engine)
    assert [request.id for request in batch] == ["0", "1", "2"]
    assert {len(request.prompt_ids) for request in batch} == {9}
    assert {request.params.max_tokens for request in batch} == {5}
    engine.submit(batch[0])
    assert mixed_trace.static_batch(arrivals[1:], engine) == []

    wanted = {request.id: request.params.max_tokens for request in requests}
    times = load.run(Engine(watched, options=NO_REUSE), watched, arrivals, mixed_trace.static_batch, wanted.__getitem__)
    assert times.tokens == 2 + 5 + 3 + 4
    assert times.rows == [3] * 5 + [1] * 4  # the second batch is one request alone
    assert times.latency["0"] < times.latency["2"] < times.latency["1"] < times.latency["3"]


def test_poisson_arrivals_come_at_their_rate(load: ModuleType) -> None:
    requests = load.mixed_requests(4000, (1, 2), (1, 2), 5000)
    times = np.array([arrival.at for arrival in load.poisson(requests, rate=20.0)])
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(4000 / 20, rel=0.1)
    assert np.diff(times).std() == pytest.approx(1 / 20, rel=0.1)  # as the mean, where gaps are exponential


def test_a_load_keeps_its_number_of_sequences(load: ModuleType) -> None:
    import scheduler_overhead

    turnover = scheduler_overhead.Load(6, 8, 40, None)
    figures = turnover.run()
    statistics = turnover.engine.statistics()
    assert statistics["running"] + statistics["waiting"] == 6
    assert statistics["finished"]["length"] > 20
    assert figures["mean ms"] > 0
