"""A runner that notes the shape of every step and, of the C++ executor, how long it and each of its nodes took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.runner import Runner, RunnerInfo
from hybridtrt.runtime.work import StepShape


@dataclass(frozen=True)
class LoggedStep:
    """One step; `node_seconds` in the order of `counted_nodes`, None where nodes are not timed.

    `native_seconds` are those in the executor, None on torch.
    """

    batch: StepBatch
    node_seconds: NDArray[np.float64] | None = None
    native_seconds: float | None = None

    @property
    def shape(self) -> StepShape:
        """Found when it is asked for: while steps are timed it would count as theirs."""
        return StepShape.of(self.batch)


class LoggingRunner:
    """Passes everything on to `runner`. With `profile` nodes are timed, which only a `CpuRunner` can."""

    def __init__(self, runner: Runner, profile: bool = False) -> None:
        self.runner = runner
        self.steps: list[LoggedStep] = []
        self._native = runner.native if isinstance(runner, CpuRunner) else None
        self._timed = self._native if profile else None

    @property
    def info(self) -> RunnerInfo:
        return self.runner.info

    @property
    def profiles(self) -> bool:
        """Whether nodes are timed."""
        return self._timed is not None

    def clear_slots(self, slots: Sequence[int]) -> None:
        self.runner.clear_slots(slots)

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self.runner.copy_pages(copies)

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Any:
        return self.runner.save(pages, slots)

    def restore(self, saved: Any, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        self.runner.restore(saved, pages, slots)

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        self.runner.poison(pages, slots)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        if self._timed is None:
            logits, seconds = self.runner.step(batch), None
        else:
            self._timed.profile(True)
            logits = self.runner.step(batch)
            seconds = self._timed.times() / 1e9
        native = None if self._native is None else self._native.seconds
        self.steps.append(LoggedStep(batch, seconds, native))
        return logits

    def close(self) -> None:
        self.runner.close()
