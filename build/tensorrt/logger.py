"""What TensorRT says while it builds: errors kept for one clear line, warnings to our log."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

log = logging.getLogger("hybridtrt.build.tensorrt")


class LoggerMethods:
    """The methods of the logger class; `make_logger` joins them with TensorRT's interface."""

    trt: Any

    def start(self) -> None:
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        levels = self.trt.ILogger.Severity
        if severity in (levels.ERROR, levels.INTERNAL_ERROR):
            self.errors.append(" ".join(message.split()))
            log.debug("%s", message)
        elif severity == levels.WARNING:
            log.debug("TensorRT warns: %s", message)

    def first_error(self) -> str:
        """What went wrong first: what follows is of no use to a reader."""
        return self.errors[0] if self.errors else "it does not say why"


@cache
def _logger_class(trt: Any) -> Any:
    def start(self: Any) -> None:
        trt.ILogger.__init__(self)
        self.start()

    return type("HybridLogger", (LoggerMethods, trt.ILogger), {"__init__": start, "trt": trt})


def make_logger(trt: Any) -> Any:
    """A logger for one TensorRT module; it must outlive everything made with it."""
    return _logger_class(trt)()


@cache
def _monitor_class(trt: Any) -> Any:
    class Methods:
        """Phases nest; the outermost says how much is done."""

        progress: Any
        stopped: Any
        _phases: dict[str, tuple[int, int]]

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._phases[phase_name] = 0, num_steps
                self.progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._phases:
                self.progress(phase_name, step, self._phases[phase_name][1])
            return not self.stopped()

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self._phases:
                steps = self._phases.pop(phase_name)[1]
                self.progress(phase_name, steps, steps)

    def start(self: Any, progress: Any, stopped: Any) -> None:
        trt.IProgressMonitor.__init__(self)
        self.progress, self.stopped, self._phases = progress, stopped, {}

    return type("HybridProgress", (Methods, trt.IProgressMonitor), {"__init__": start})


def make_monitor(trt: Any, progress: Any, stopped: Any) -> Any:
    """A progress monitor that calls `progress(phase, steps done, steps)`, and ends the build where `stopped()`."""
    return _monitor_class(trt)(progress, stopped)
