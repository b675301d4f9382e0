"""What an engine counts and times, and a snapshot of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from hybridtrt.runtime.request import FinishReason

BOUNDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))  # seconds, 1 ms to 500 s


@dataclass
class Counters:
    """What has happened since the engine started, but for the last two fields."""

    steps: int = 0
    prefill_tokens: int = 0  # tokens of prompts that were run, with those that run again after a preemption
    decode_tokens: int = 0  # sampled tokens that were run
    sampled_tokens: int = 0
    draft_tokens: int = 0  # proposed by speculation
    accepted_draft_tokens: int = 0
    lookup_tokens: int = 0  # of prompts that were looked up in the prefix cache
    hit_tokens: int = 0  # found there
    preempted_recompute: int = 0
    preempted_swap: int = 0
    swapped_in: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    last_prefill_tokens: int = 0  # of the last step
    last_decode_tokens: int = 0


@dataclass
class Histogram:
    """Observations in seconds, counted by the buckets that `BOUNDS` end (inclusive) and one beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


@dataclass(slots=True)
class RequestTimes:
    """When an answer came to each point of its way, on the recorder's clock; None: it did not come there."""

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None


class Recorder:
    """Counters that the engine increments itself, and histograms that it feeds once an answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.counters = Counters()
        self.histograms = {name: Histogram() for name in ("queue", "first_token", "per_output_token", "end_to_end")}

    def finished(self, times: RequestTimes, tokens: int, reason: str) -> None:
        """An answer of `tokens` tokens ends now.

        The time per output token is the mean over all but the first. It and the time from end to end are observed of
        complete answers only, so that clients that go away do not make an engine look fast.
        """
        self.counters.finished[reason] += 1
        if times.scheduled is not None:
            self.histograms["queue"].observe(times.scheduled - times.submitted)
        if times.first_token is None:
            return
        self.histograms["first_token"].observe(times.first_token - times.submitted)
        if reason in ("stop", "length"):
            now = self.clock()
            self.histograms["end_to_end"].observe(now - times.submitted)
            if tokens > 1:
                self.histograms["per_output_token"].observe((now - times.first_token) / (tokens - 1))


@dataclass(frozen=True)
class Usage:
    """Pages of one group, or slots, without the reserved number 0. The used, free and cached ones are all."""

    used: int
    free: int
    cached: int = 0  # held by the prefix cache alone, which gives them back on demand
    promised: int = 0  # part of `free` and `cached` that is reserved by running requests


@dataclass(frozen=True)
class Statistics:
    """A snapshot."""

    running: int
    waiting: int  # with the preempted ones
    preempted: int
    slots: Usage
    pages: Mapping[str, Usage]  # by group
    swap_used: int  # bytes
    swap_max: int
    hit_rate: float  # tokens hit of those looked up
    counters: Counters
    histograms: Mapping[str, Histogram]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the counters stand beside the other fields."""
        values: dict[str, Any] = asdict(self)
        counters: dict[str, Any] = values.pop("counters")
        return values | counters


def snapshot(
    recorder: Recorder,
    running: int,
    waiting: int,
    preempted: int,
    slots: Usage,
    pages: Mapping[str, Usage],
    swap_used: int = 0,
    swap_max: int = 0,
) -> Statistics:
    """The statistics of now. It shares counters and histograms with the recorder: make plain data of it at once."""
    counters = recorder.counters
    return Statistics(
        running=running,
        waiting=waiting,
        preempted=preempted,
        slots=slots,
        pages=pages,
        swap_used=swap_used,
        swap_max=swap_max,
        hit_rate=counters.hit_tokens / max(counters.lookup_tokens, 1),
        counters=counters,
        histograms=recorder.histograms,
    )
