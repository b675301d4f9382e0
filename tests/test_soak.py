"""10,000 short requests, a third of them aborted: memory stays flat and every page and slot comes back."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections import Counter

from engine_strategies import optimistic_profile
from null_runner import NullRunner, null_info

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.resident_memory import resident_bytes

REQUESTS, WARM_UP = 10_000, 2_000
PAGES, SLOTS = {"full": 24, "window": 60}, 16
PREFIXES = [tuple(range(10 * i, 10 * i + 9)) for i in range(4)]


class Forgetful(NullRunner):
    """Keeps no batches."""

    def __init__(self) -> None:
        windows = {"window": 8}
        info = null_info(vocab_size=64, num_pages=PAGES, num_slots=SLOTS, windows=windows)
        super().__init__(info, on_step=lambda batch: self.batches.clear())


def random_request(rng: random.Random, number: int) -> Request:
    """One of a few prefixes with an end of its own, and 1 to 12 new tokens."""
    prompt = rng.choice(PREFIXES)[: rng.randint(1, 9)] + tuple(rng.choices(range(64), k=rng.randint(0, 6)))
    params = SamplingParams(
        max_tokens=rng.randint(1, 12),
        temperature=rng.choice([None, 0.8]),
        logit_bias=rng.choice([(), ((7, 9.0),)]),
        n=rng.choice([1, 1, 1, 2]),
        stop_token_ids=(5, 6),
        stream_interval=rng.choice([1, 4]),
    )
    return Request(str(number), prompt, params, priority=rng.choice([0.2, 0.5]))


def soak() -> dict[str, object]:
    """Serve all requests and return how they ended, the memory before and after, and the state of the pools."""
    rng = random.Random(0)
    options = EngineOptions(policy="max_utilization", swap_bytes=120, snapshot_interval=8, max_draft_tokens=2)
    engine = Engine(Forgetful(), options=options, profile=optimistic_profile(PAGES, token_seconds=1.0))
    ends: Counter[str] = Counter()
    live: set[str] = set()
    doomed: dict[str, int] = {}  # ids with the step in which they are aborted
    submitted = steps = before = 0
    while submitted < REQUESTS or engine.has_work:
        while submitted < REQUESTS and len(live) < 16:
            request = random_request(rng, submitted)
            engine.submit(request)
            live.add(request.id)
            submitted += 1
            if rng.random() < 0.45:
                doomed[request.id] = steps + rng.randint(0, 12)
            if submitted == WARM_UP:
                gc.collect()
                before = resident_bytes()
        for name in [name for name, step in doomed.items() if step <= steps]:
            del doomed[name]
            engine.cancel(name)
        for output in engine.step():
            if output.ends_request:
                live.remove(output.request_id)
                ends[output.finish_reason or ""] += 1
        steps += 1
    gc.collect()
    after = resident_bytes()
    engine.check_integrity()
    return {"ends": ends, "before": before, "after": after, "statistics": engine.statistics()}


def test_memory_is_flat_and_nothing_leaks() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    ends, statistics = report["ends"], report["statistics"]
    assert sum(ends.values()) == REQUESTS
    assert set(ends) == {"stop", "length", "cancelled"}
    assert 0.3 * REQUESTS < ends["cancelled"] < 0.45 * REQUESTS  # the others ended before they were aborted
    assert report["after"] < 1.02 * report["before"]
    assert statistics["running"] == statistics["waiting"] == 0
    usages = [(statistics["slots"], SLOTS), *((statistics["pages"][group], PAGES[group]) for group in PAGES)]
    for usage, count in usages:
        assert usage["used"] == usage["promised"] == statistics["swap_used"] == 0
        assert usage["free"] + usage["cached"] == count - 1
    for happened in ("preempted_recompute", "preempted_swap", "hit_tokens", "accepted_draft_tokens"):
        assert statistics[happened] > 50, happened


if __name__ == "__main__":
    print(json.dumps(soak()))
