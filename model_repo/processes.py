"""Starts an engine process and tritonserver, watches both, and starts again what has died."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hybridtrt.model_repo import triton
from hybridtrt.model_repo.child import Child, is_live
from hybridtrt.model_repo.preflight import (
    ServeError,
    check_interpreter,
    check_numpy,
    check_shm,
    claim_ports,
    find_triton,
)
from hybridtrt.model_repo.repository import MODELS, ModelSettings, write_repository
from hybridtrt.model_repo.state import State, default_folder
from hybridtrt.runtime.client import EngineClient
from hybridtrt.runtime.run_options import RunOptions

CHECK_SECONDS = 0.1
PROGRESS_SECONDS = 5.0
TRITON_START_SECONDS = 120.0
TRITON_STOP_SECONDS = 5.0
LIVENESS_SECONDS = 5.0  # between two questions to tritonserver's HTTP front
LIVENESS_FAILURES = 3


@dataclass(frozen=True)
class ServeOptions:
    """How to serve an engine folder. A port of 0 takes a free one."""

    engine_dir: Path
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    run: RunOptions = field(default_factory=RunOptions)  # of the engine process, which checks them
    state_dir: Path | None = None  # default: one for each user and HTTP port
    drain_seconds: float = 5.0  # how long running requests may go on when the server stops
    max_restarts: int = 5  # within `restart_seconds`; more of them end the server
    restart_seconds: float = 60.0
    runner_factory: str | None = None  # "module:function", called with the engine folder instead of loading it (tests)

    def __post_init__(self) -> None:
        if not 0 <= self.drain_seconds < 86400:
            raise ServeError(f"drain_seconds={self.drain_seconds} is not in 0..86400")
        if not self.engine_dir.is_dir():
            raise ServeError(f"{self.engine_dir} is not an engine folder")

    @property
    def ports(self) -> dict[str, int]:
        return {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}


class DiedError(ServeError):
    """A process ended while it started."""


class StoppedError(Exception):
    """The server was asked to stop while something was waited for."""


class Processes:
    """The two processes. One thread makes all calls: the kernel ends the processes when it ends."""

    def __init__(self, options: ServeOptions, report: Callable[[str], None], stopping: threading.Event) -> None:
        self.options, self._report, self._stopping = options, report, stopping
        self.ports: dict[str, int] = {}
        self.state: State | None = None
        self.engine: Child | None = None
        self.triton: Child | None = None
        self.engine_ready = False
        self._client: EngineClient | None = None
        self._stubs: set[int] = set()
        self._recent: deque[float] = deque()  # times of restarts
        self._asked = 0.0
        self._unanswered = 0

    def open(self) -> None:
        """Check, start both processes and wait until they serve.

        Raises:
            ServeError: something is missing or in the way, or a process did not start.
            StoppedError: while it waited.
        """
        check_interpreter()
        check_numpy(np.__version__)
        check_shm()
        self._installed = find_triton()
        self.ports = claim_ports(self.options.ports)
        self.state = State(self.options.state_dir or default_folder(self.ports["http_port"]))
        self._env = triton.environment(self._installed, self.state)
        write_repository(self.state.repository, ModelSettings(str(self.state.socket)))
        self._client = EngineClient(self.state.socket)
        self._report(f"loading {self.options.engine_dir}")
        self._start_engine()
        self._wait_for("engine", self._engine_answers)
        self._report("starting tritonserver")
        self._start_triton()

    def watch(self) -> None:
        """Look after both processes once; never waits for the engine.

        Raises:
            ServeError: a process does not start again, or died too often.
        """
        assert self.engine
        if how := self.engine.ended:
            self._spend_restart(f"the engine process {how}{_because(self.engine)}")
            self._start_engine()
        elif not self.engine_ready and self._engine_answers():
            self._report("the engine is back")
        if trouble := self._triton_trouble():
            self._restart_triton(trouble)
            self._report("tritonserver is back")

    def close(self) -> None:
        """Let the engine finish what runs, then end everything and clean up."""
        if self.engine is not None:
            self.engine.terminate(self.options.drain_seconds + 2)
        self._end_triton(TRITON_STOP_SECONDS)
        if self._client is not None:
            self._client.close()
        if self.state is not None:
            self.state.close()

    def _start_engine(self) -> None:
        assert self.state
        options = self.options
        command = [sys.executable, "-P", "-m", "hybridtrt.runtime.engine_process", "--exit-with-parent"]
        command += ["--engine", str(options.engine_dir), "--socket", str(self.state.socket)]
        command += ["--drain-seconds", str(options.drain_seconds), *options.run.arguments()]
        if options.runner_factory is not None:
            command += ["--runner-factory", options.runner_factory]
        self.engine_ready = False
        self.engine = Child("engine", command, self.state.engine_log)

    def _engine_answers(self) -> bool:
        assert self._client
        self.engine_ready = self._client.info is not None
        return self.engine_ready

    def _start_triton(self) -> None:
        assert self.state
        self.triton = triton.start(self._installed, self.state, self.ports, self._env)
        self._unanswered = 0
        self._wait_for("triton", lambda: triton.answers(self.ports["http_port"], "/v2/health/ready"))
        self._stubs = triton.stubs(self.triton)

    def _restart_triton(self, trouble: str) -> None:
        """Start tritonserver again, also if it dies while it starts, as often as restarts are left."""
        started = False
        while not started:
            self._spend_restart(trouble)
            self._end_triton(grace_seconds=0)
            try:
                self._start_triton()
                started = True
            except DiedError as error:
                trouble = str(error)

    def _triton_trouble(self) -> str | None:
        assert self.triton
        if how := self.triton.ended:
            return f"tritonserver {how}"
        if len(self._stubs) < len(MODELS) or not all(map(is_live, self._stubs)):
            return "a model's process (stub) has died"
        if time.monotonic() - self._asked > LIVENESS_SECONDS:
            alive = triton.answers(self.ports["http_port"], "/v2/health/live")
            self._unanswered = 0 if alive else self._unanswered + 1
            self._asked = time.monotonic()
        return "tritonserver does not answer" if self._unanswered >= LIVENESS_FAILURES else None

    def _end_triton(self, grace_seconds: float) -> None:
        if self.triton is not None and self.state is not None:
            self.triton.terminate(grace_seconds)
            self.state.remove_shm()

    def _wait_for(self, name: str, condition: Callable[[], bool]) -> None:
        """Wait for a process' readiness, showing progress."""
        start = shown = time.monotonic()
        while not condition():
            child = self.engine if name == "engine" else self.triton
            assert child
            if how := child.ended:
                raise DiedError(f"{child.name} {how}{_because(child)} (log: {child.log})")
            now = time.monotonic()
            if name == "triton" and now - start > TRITON_START_SECONDS:
                raise ServeError(f"tritonserver is not ready after {TRITON_START_SECONDS:g} s (log: {child.log})")
            if now - shown > PROGRESS_SECONDS:
                shown = now
                self._report(f"{child.name}: loading, {now - start:.0f} s")
            if self._stopping.wait(CHECK_SECONDS):
                raise StoppedError

    def _spend_restart(self, why: str) -> None:
        now = time.monotonic()
        while self._recent and now - self._recent[0] > self.options.restart_seconds:
            self._recent.popleft()
        if len(self._recent) >= self.options.max_restarts:
            raise ServeError(f"{why}, after {len(self._recent)} restarts within {self.options.restart_seconds:g} s")
        self._recent.append(now)
        self._report(f"{why}; starting it again")


def _because(child: Child) -> str:
    complaint = child.complaint()
    return f": {complaint}" if complaint else ""
