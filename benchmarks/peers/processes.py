"""The caller's side of protocol.py: an engine in a process of its own, which is idle between jobs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """`batch` random prompts of one length, and the tokens to generate after each."""

    batch: int
    prompt: int
    new: int


class WorkerError(Exception):
    """What a worker said, or how it ended."""


class Worker:
    """Starts `command` and waits until it is loaded. Raises `WorkerError` if it does not get there."""

    def __init__(self, command: Sequence[str], threads: int, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})},
        )
        self.load_seconds = float(self._answer()["ready"])

    def run(self, job: Job) -> dict[str, Any]:
        """Do a job and return its answer. Raises `WorkerError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{job.batch} {job.prompt} {job.new}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._end()) from None
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"]) + self._last_words())
        return answer

    def _end(self) -> str:
        return f"ended with status {self._process.wait()}" + self._last_words()

    def _last_words(self) -> str:
        """What stood last on standard error."""
        self._log.seek(0)
        words = self._log.read().strip().splitlines()
        return f": {words[-1][:200]}" if words else ""


def run_quietly(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
    """Run a command to its end. Raises `WorkerError` with its last words where it fails."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise WorkerError(
            f"{Path(command[1] if len(command) > 1 else command[0]).name}: {(words or ['failed'])[-1][:300]}"
        )
