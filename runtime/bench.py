"""Throughput of an engine in process: prefill and decode of a batch of equal requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.resident_memory import peak_bytes, reset_peak


@dataclass(frozen=True)
class BenchResult:
    """Tokens a second over the whole batch; peak resident memory of the process while this batch ran, in 10^6 bytes."""

    batch: int
    prompt: int
    new: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    peak_rss_mb: float


def bench(
    engine_dir: str | Path,
    batches: Sequence[int],
    prompt: int,
    new: int,
    threads: int | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> Iterator[BenchResult]:
    """Yield one result a batch size. Prefill lasts until every request has its first token, decode from there.

    Raises `ValueError` if a batch, the prompt or the output does not fit the engine.
    """
    runner = load_runner(engine_dir, RuntimeOptions(threads=threads, enable_block_reuse=False))
    info = runner.info
    for batch in batches:
        if not 1 <= batch <= info.max_batch_size:
            raise ValueError(f"batch {batch} is not in 1..{info.max_batch_size} (max_batch_size of the engine)")
    if prompt < 1 or new < 2 or prompt + new > info.max_seq_len:
        raise ValueError(
            f"prompt {prompt} and new {new} need prompt >= 1, new >= 2 and at most {info.max_seq_len} tokens together "
            "(max_seq_len of the engine)"
        )
    engine = Engine(runner, options=EngineOptions(enable_block_reuse=False))  # batches have equal prompts
    _run(engine, 1, min(prompt, 8), 2, lambda: None)  # touches every weight once
    for batch in batches:
        reset_peak()
        prefill, decode = _run(engine, batch, prompt, new, on_token)
        rates = (round(batch * prompt / prefill[1], 2), round(decode[0] / decode[1], 2))
        yield BenchResult(batch, prompt, new, *rates, round(peak_bytes() / 1e6, 1))
    engine.close()


def _run(
    engine: Engine, batch: int, prompt: int, new: int, on_token: Callable[[], None]
) -> tuple[tuple[int, float], tuple[int, float]]:
    """Sampled tokens and seconds of prefill, and the same of decode."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    for i in range(batch):
        ids = rng.integers(0, engine.info.vocab_size, prompt).tolist()
        engine.submit(Request(f"bench-{i}", tuple(ids), params))
    started = time.perf_counter()
    first: set[str] = set()
    tokens, prefill = 0, (0, 0.0)
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise ValueError(f"{output.request_id}: {output.error}")
            on_token()
            first.add(output.request_id)
            tokens += 1
        if len(first) == batch and not prefill[0]:
            prefill = tokens, time.perf_counter() - started
    return prefill, (tokens - prefill[0], time.perf_counter() - started - prefill[1])
