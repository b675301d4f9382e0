"""Steps of a runner that only take time, and that by a clock of their own: policies compared without any noise."""

from __future__ import annotations

import math

import numpy as np
from constant_runner import ConstantRunner
from load import Clock, WatchedRunner
from numpy.typing import NDArray

from hybridtrt.build.engine import BuildConfig
from hybridtrt.plugins.step import StepBatch

STEP_SECONDS, TOKEN_SECONDS = 0.01, 0.0005  # about what a small model takes on two cores


class SimulatedClock(Clock):
    """Seconds that pass only while somebody sleeps, and then always do."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(lambda: self._now)

    def sleep(self, seconds: float) -> None:
        self._now = max(self._now + seconds, math.nextafter(self._now, math.inf))


class SimulatedRunner(ConstantRunner):
    """Steps take 10 ms and 0.5 ms a token."""

    def __init__(self, limits: BuildConfig, clock: Clock, cached_tokens: int | None) -> None:
        super().__init__(limits.max_batch_size, limits.max_seq_len, limits.max_num_tokens, cached_tokens)
        self._clock = clock

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        self._clock.sleep(STEP_SECONDS + TOKEN_SECONDS * batch.num_tokens)
        return super().step(batch)


def simulated_runner(limits: BuildConfig, cached_tokens: int | None = None) -> WatchedRunner:
    """With pages for so many tokens in each group or for all that may come."""
    clock = SimulatedClock()
    return WatchedRunner(SimulatedRunner(limits, clock, cached_tokens), clock)
