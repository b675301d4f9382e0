"""Throughput of an engine in process: prefill and decode of a batch of equal requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.limits import Limits
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.node_profile import PhaseProfile, profile_phase
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.resident_memory import peak_bytes, reset_peak
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.step_log import LoggedStep, LoggingRunner
from hybridtrt.runtime.work import CountedNode, counted_nodes, total


@dataclass(frozen=True)
class Achieved:
    """Bytes of weights and caches moved, and operations computed, a second; and their share of the machine's limits.

    The shares are None where the limits are not known. A value above 1 means that not all bytes came from memory.
    """

    gb_per_s: float
    gflop_per_s: float
    memory_share: float | None
    compute_share: float | None

    def render(self) -> str:
        """Both, with their shares."""
        return (
            f"{self.gb_per_s:.1f} GB/s{_share(self.memory_share)}, {self.gflop_per_s:.1f} GFLOP/s"
            f"{_share(self.compute_share)}"
        )


@dataclass(frozen=True)
class BenchResult:
    """Tokens a second over the whole batch; peak resident memory of the process while this batch ran, in 10^6 bytes.

    TTFT is the median of the requests, from when all were submitted; TPOT is the median of the decode steps, and
    `between_ms` that of what a decode step takes outside the C++ executor, None on torch.
    """

    batch: int
    prompt: int
    new: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    between_ms: float | None
    peak_rss_mb: float
    prefill: Achieved
    decode: Achieved
    profile: tuple[PhaseProfile, ...] = ()

    def render(self) -> str:
        """A few lines, and the tables of the profile."""
        between = "" if self.between_ms is None else f" ({self.between_ms:.2f} outside the executor)"
        lines = [
            f"batch {self.batch}, prompt {self.prompt}, new {self.new}: "
            f"prefill {self.prefill_tokens_per_s:.1f} tokens/s, decode {self.decode_tokens_per_s:.1f} tokens/s, "
            f"TTFT {self.ttft_ms:.1f} ms, TPOT {self.tpot_ms:.2f} ms{between}, peak memory {self.peak_rss_mb:.0f} MB",
            f"  prefill {self.prefill.render()}",
            f"  decode  {self.decode.render()}",
        ]
        for phase in self.profile:
            lines += ["", *(f"  {line}".rstrip() for line in phase.render().splitlines())]
        return "\n".join(lines + [""] * bool(self.profile))


@dataclass(frozen=True)
class Run:
    """One batch from its submission on: seconds until every request had its first token, and of each step after."""

    batch: int
    prompt: int
    prefill_seconds: float
    first_token_seconds: tuple[float, ...]
    decode_tokens: int
    decode_step_seconds: tuple[float, ...]
    prefill_steps: tuple[LoggedStep, ...]
    decode_steps: tuple[LoggedStep, ...]
    tokens: dict[str, list[int]]

    @property
    def decode_seconds(self) -> float:
        return sum(self.decode_step_seconds)

    @property
    def between_seconds(self) -> list[float]:
        """Of each decode step what it took outside the C++ executor; nothing on torch."""
        pairs = zip(self.decode_step_seconds, self.decode_steps, strict=True)
        return [seconds - step.native_seconds for seconds, step in pairs if step.native_seconds is not None]

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.batch * self.prompt / self.prefill_seconds

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_seconds


class Bench:
    """An engine that runs batches of equal requests. Closes its runner at the end of `with`."""

    def __init__(self, runner: Runner, profile: bool = False) -> None:
        self._runner = LoggingRunner(runner, profile)
        self.info = runner.info
        self.nodes: list[CountedNode] = counted_nodes(runner)
        self._engine = Engine(self._runner, options=EngineOptions(enable_block_reuse=False))  # prompts may be equal
        if self.info.max_seq_len > 2:
            self.run([[0] * min(8, self.info.max_seq_len - 2)], 2)  # touches every weight once

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    @property
    def profiles(self) -> bool:
        """Whether runs tell how long each node took."""
        return self._runner.profiles

    def check(self, batches: Sequence[int], prompt: int, new: int) -> None:
        """Raise `ValueError` if a batch, the prompt or the output does not fit the engine."""
        info = self.info
        for batch in batches:
            if not 1 <= batch <= info.max_batch_size:
                raise ValueError(f"batch {batch} is not in 1..{info.max_batch_size} (max_batch_size of the engine)")
        if prompt < 1 or new < 2 or prompt + new > info.max_seq_len:
            raise ValueError(
                f"prompt {prompt} and new {new} need prompt >= 1, new >= 2 and at most {info.max_seq_len} tokens "
                "together (max_seq_len of the engine)"
            )

    def run(self, prompts: Sequence[Sequence[int]], new: int, on_token: Callable[[], None] = lambda: None) -> Run:
        """Run prompts of one length in one batch to `new` greedy tokens each."""
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        for i, ids in enumerate(prompts):
            self._engine.submit(Request(f"bench-{i}", tuple(ids), params))
        self._runner.steps.clear()
        started = before = time.perf_counter()
        first: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        step_seconds, prefill_tokens, prefill_steps = [], 0, 0
        while self._engine.has_work:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error:
                    raise ValueError(f"{output.request_id}: {output.error}")
                on_token()
                first.setdefault(output.request_id, now - started)
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if prefill_tokens:
                step_seconds.append(now - before)
            elif len(first) == len(prompts):
                prefill_tokens, prefill_steps = sum(map(len, tokens.values())), len(self._runner.steps)
            before = now
        steps = tuple(self._runner.steps)
        return Run(
            batch=len(prompts),
            prompt=len(prompts[0]),
            prefill_seconds=max(first.values()),
            first_token_seconds=tuple(first.values()),
            decode_tokens=sum(map(len, tokens.values())) - prefill_tokens,
            decode_step_seconds=tuple(step_seconds),
            prefill_steps=steps[:prefill_steps],
            decode_steps=steps[prefill_steps:],
            tokens=tokens,
        )

    def achieved(self, steps: Sequence[LoggedStep], seconds: float, limits: Limits | None = None) -> Achieved:
        """What steps that took so many seconds moved and computed."""
        work = total(node.work(step.shape) for step in steps for node in self.nodes)
        moved, computed = work.bytes / seconds / 1e9, work.flops / seconds / 1e9
        shares = (None, None) if limits is None else (moved / limits.read_gb_per_s, computed / limits.gflop_per_s)
        return Achieved(round(moved, 2), round(computed, 2), *(share and round(share, 3) for share in shares))

    def profile(self, run: Run) -> tuple[PhaseProfile, ...]:
        """Where the time of a run went; nothing where nodes are not timed."""
        if not self.profiles:
            return ()
        return (
            profile_phase("prefill", self.nodes, run.prefill_steps, run.prefill_seconds),
            profile_phase("decode", self.nodes, run.decode_steps, run.decode_seconds),
        )


def open_bench(engine_dir: str | Path, threads: int | None = None, profile: bool = False) -> Bench:
    """Load an engine. Raises `ValueError` with one clear line where that fails."""
    return Bench(load_runner(engine_dir, RuntimeOptions(threads=threads, enable_block_reuse=False)), profile)


def measure(
    bench: Bench,
    batches: Sequence[int],
    prompt: int,
    new: int,
    limits: Limits | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> Iterator[BenchResult]:
    """Yield one result a batch size. Prefill lasts until every request has its first token, decode from there.

    Raises `ValueError`, before anything runs, if a batch, the prompt or the output does not fit the engine.
    """
    bench.check(batches, prompt, new)
    rng = np.random.default_rng(0)
    for batch in batches:
        reset_peak()
        run = bench.run(rng.integers(0, bench.info.vocab_size, (batch, prompt)).tolist(), new, on_token)
        yield BenchResult(
            batch=batch,
            prompt=prompt,
            new=new,
            prefill_tokens_per_s=round(run.prefill_tokens_per_s, 2),
            decode_tokens_per_s=round(run.decode_tokens_per_s, 2),
            ttft_ms=round(statistics.median(run.first_token_seconds) * 1e3, 3),
            tpot_ms=round(statistics.median(run.decode_step_seconds) * 1e3, 3),
            between_ms=round(statistics.median(run.between_seconds) * 1e3, 3) if run.between_seconds else None,
            peak_rss_mb=round(peak_bytes() / 1e6, 1),
            prefill=bench.achieved(run.prefill_steps, run.prefill_seconds, limits),
            decode=bench.achieved(run.decode_steps, run.decode_seconds, limits),
            profile=bench.profile(run),
        )


def _share(value: float | None) -> str:
    return "" if value is None else f" ({value:.0%} of the limit)"
