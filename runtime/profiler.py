"""A sample load on an engine, and the profile that it gives."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hybridtrt.converters.memory import cache_memory
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.profile import FORMAT, GroupBytes, Profile, RangeProfile, engine_identity
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.resident_memory import peak_bytes, reset_peak, resident_bytes
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.step_profiler import StepProfiler, doublings, touch_pools
from hybridtrt.runtime.validation import MAX_SEED

SHORTEST = 32  # tokens; a page or two


@dataclass(frozen=True)
class SampleLoad:
    """How many requests to run and how long: ranges of prompt + max_tokens that begin at these powers of two.

    `ranges` None are all below the engine's longest sequence, from 32 tokens on if there are such.
    """

    requests: int = 100
    ranges: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED // 2:  # each request has one of its own, from here on
            raise ValueError(f"seed={self.seed} must be an integer in 0..{MAX_SEED // 2}")

    def sample(self, info: RunnerInfo) -> list[Request]:
        """Random prompts that share nothing, each with a random part of its length left for the output.

        Raises `ValueError` for a range that is no power of two or not below the engine's longest sequence, and for
        fewer requests than ranges.
        """
        ranges = self._ranges(info.max_seq_len)
        if self.requests < len(ranges):
            raise ValueError(f"requests={self.requests} is less than one for each of {len(ranges)} ranges")
        rng = np.random.default_rng(self.seed)
        requests = []
        for i in range(self.requests):
            least = ranges[i % len(ranges)]
            total = int(rng.integers(least, min(2 * least, info.max_seq_len + 1)))
            prompt = rng.integers(0, info.vocab_size, rng.integers(1, total)).tolist()
            params = SamplingParams(max_tokens=total - len(prompt), temperature=1.0, seed=self.seed + i)
            requests.append(Request(f"profile-{i}", tuple(prompt), params))
        return requests

    def _ranges(self, max_seq_len: int) -> Sequence[int]:
        powers = [1 << bits for bits in range(1, (max_seq_len - 1).bit_length())]
        if self.ranges is None:
            if not powers:
                raise ValueError(f"max_seq_len={max_seq_len} of the engine is too short for a sample load")
            return [power for power in powers if power >= SHORTEST] or powers
        for least in self.ranges:
            if least not in powers:
                raise ValueError(
                    f"range {least} is not a power of two in 2..{max_seq_len - 1} (max_seq_len of the engine)"
                )
        return self.ranges


@dataclass
class _Held:
    """Sums over steps: pages held by the running requests, and the tokens that these asked for."""

    asked: float = 0.0
    pages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_token: list[float] = field(default_factory=list)  # seconds since the submission


def profile_engine(
    engine_dir: str | Path, load: SampleLoad, threads: int | None = None, on_stage: Callable[[str], None] = print
) -> Profile:
    """Measure an engine. Raises `ValueError` for a load that does not fit it or an engine that cannot be loaded."""
    engine_dir = Path(engine_dir)
    runner = load_runner(engine_dir, RuntimeOptions(threads=threads, enable_block_reuse=False))
    requests = load.sample(runner.info)
    try:
        touch_pools(runner, runner.info)
        steps = StepProfiler(runner, load.seed)
        on_stage("decode steps")
        decode = steps.decode()
        on_stage("prefill steps")
        prefill = steps.prefill()
        copy_bytes_per_s = steps.copy_bytes_per_s()
        engine = Engine(runner, options=EngineOptions(enable_block_reuse=False))
        ranges = tuple(profile_ranges(engine, requests, on_stage))
    finally:
        runner.close()
    return Profile(FORMAT, engine_identity(engine_dir), ranges, decode, prefill, copy_bytes_per_s)


def profile_ranges(
    engine: Engine, requests: Sequence[Request], on_stage: Callable[[str], None] = lambda stage: None
) -> Iterator[RangeProfile]:
    """Run the requests, range by range, in batches of 1, 2, 4 ... up to the engine's largest, over and over.

    The engine must be idle and its prefix cache off: what it shares or keeps is held by nobody in particular.
    """
    info, memory = engine.info, cache_memory(engine.info.caches)
    by_range = defaultdict(list)
    for request in requests:
        by_range[1 << (_asked(request).bit_length() - 1)].append(request)
    for least, members in sorted(by_range.items()):
        on_stage(f"{len(members)} requests of {least} to {2 * least - 1} tokens")
        base = resident_bytes()
        reset_peak()
        held = _run(engine, members)
        yield RangeProfile(
            least=least,
            requests=len(members),
            pages=tuple(
                GroupBytes(group, held.pages[group] * info.page_size * size / held.asked)
                for group, size in memory.kv_bytes_per_token.items()
                if held.pages[group]
            ),
            state_bytes=memory.state_bytes,
            peak_chunk_bytes=max(peak_bytes() - base, 0),
            time_to_first_token=statistics.fmean(held.first_token),
        )


def _run(engine: Engine, requests: Sequence[Request]) -> _Held:
    held, rest = _Held(), list(requests)
    while rest:
        for size in doublings(engine.info.max_batch_size):
            _run_batch(engine, rest[:size], held)
            del rest[:size]
    return held


def _run_batch(engine: Engine, requests: Sequence[Request], held: _Held) -> None:
    """Run requests together; what they hold is looked at after each step, so that it counts for the time it is held."""
    unfinished = {request.id: _asked(request) for request in requests}
    without_token = set(unfinished)
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while unfinished:
        outputs = engine.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            if output.error:
                raise ValueError(f"{output.request_id}: {output.error}")
            if output.request_id in without_token:
                without_token.remove(output.request_id)
                held.first_token.append(seconds)
            if output.ends_request:
                del unfinished[output.request_id]
        if unfinished:
            now = engine.statistics()
            held.asked += sum(unfinished.values()) * now["running"] / len(unfinished)
            for group, usage in now["pages"].items():
                held.pages[group] += usage["used"]


def _asked(request: Request) -> int:
    return len(request.prompt_ids) + request.params.max_tokens
