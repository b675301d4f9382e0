"""Child processes that never outlive their parent.

The kernel kills a child when the thread that started it ends, so one thread that lives as long as the children must
start them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Child:
    """A process with its own process group, and a log file for what it prints."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> str | None:
        """How it ended, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def complaint(self) -> str:
        """The last line that it printed that looks like an error, or "" if there is none."""
        with self.log.open("rb") as printed:
            printed.seek(self._log_start)
            text = printed.read().decode("utf-8", "replace")
        lines = re.findall(r"^(?:error: |(?=load failed|E\d{4} ))(.+)$", text, re.MULTILINE)
        return str(lines[-1]) if lines else ""

    def terminate(self, grace_seconds: float) -> None:
        """SIGTERM, then SIGKILL for the whole group when the grace is over."""
        if grace_seconds > 0:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def children(pid: int, name: str) -> set[int]:
    """The live children of a process whose program's name contains `name`."""
    numbers = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {child for child in numbers if _status(child)[1:2] == [str(pid)] and is_live(child) and _runs(child, name)}


def is_live(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    status = _status(pid)
    return bool(status) and status[0] not in "ZX"


def _status(pid: int) -> list[str]:
    """State, parent and more, of `proc_pid_stat(5)`."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _runs(pid: int, name: str) -> bool:
    return name in _read(Path(f"/proc/{pid}/cmdline")).partition("\0")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:  # the process has gone
        return ""


def _main(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
