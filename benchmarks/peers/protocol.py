"""What a worker process and its caller say to each other, one line each.

The worker says `{"ready": SECONDS}` when it is loaded. Each job is `BATCH PROMPT NEW`, and its answer an object of
`prefill_s` (until every sequence has its first token), `decode_s` and `decode_tokens` (after that), `peak_rss_mb` while
the job ran, and `tokens`, the first sequence's greedy ones. A worker that cannot do a job says `{"error": "..."}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridtrt.runtime.resident_memory import peak_bytes, reset_peak

FIRST_TOKEN = 3  # below are special ones

Prompts = list[list[int]]
Job = Callable[[Prompts, int], Mapping[str, Any]]


def prompts(batch: int, length: int, vocab_size: int) -> Prompts:
    """Random tokens, the same in every engine."""

    def draw() -> Iterator[int]:
        state = 1
        while True:
            state = (state * 1103515245 + 12345) % (1 << 32)
            yield FIRST_TOKEN + (state >> 8) % (vocab_size - FIRST_TOKEN)

    tokens = draw()
    return [[next(tokens) for _ in range(length)] for _ in range(batch)]


def timed(started: float, token_times: Sequence[float], batch: int) -> dict[str, Any]:
    """The seconds of a batch whose sequences all got a token at each of the times."""
    first, last = token_times[0], token_times[-1]
    return {
        "prefill_s": first - started,
        "decode_s": last - first,
        "decode_tokens": batch * (len(token_times) - 1),
    }


def serve(load: Callable[[], tuple[int, Job]]) -> None:
    """Load `(vocab_size, job)`, then do what standard input asks. Whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()

    def say(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:
        vocab_size, job = load()
        say({"ready": time.perf_counter() - started})
        for line in sys.stdin:
            batch, length, new = (int(word) for word in line.split())
            reset_peak()
            answer = job(prompts(batch, length, vocab_size), new)
            say({**answer, "peak_rss_mb": peak_bytes() / 1e6})
    except Exception as error:
        say({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
