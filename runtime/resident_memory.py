"""Resident memory of this process and what the machine has left, as Linux counts it."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

PROC = Path("/proc/self")


def resident_bytes() -> int:
    """What is resident now, without the freed memory that the allocator (glibc) would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _status("VmRSS")


def available_bytes() -> int:
    """What processes can still take without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else sys.maxsize


def peak_bytes() -> int:
    """The most that was resident since `reset_peak`, or since the start where that is not allowed."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Let the peak begin at what is resident now."""
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError:  # some containers do not allow it
        return


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", (PROC / "status").read_text())
    return int(match[1]) * 1024 if match else 0
