"""What this machine can do at most, measured: bytes read from memory and operations computed in a second."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from hybridtrt.plugins.native.library import ISAS, chosen_isa, load_library

BUSY = 0.6  # of the best: a median below shows other work


@dataclass(frozen=True)
class Limits:
    """GB (10^9 bytes) read a second and GFLOP (10^9, a multiply-add is two) a second of float32, of all threads.

    Those of the best few milliseconds of many; the medians are lower where other work disturbs.
    """

    threads: int
    isa: str
    read_gb_per_s: float
    gflop_per_s: float
    median_read_gb_per_s: float
    median_gflop_per_s: float

    def render(self) -> str:
        """One line, with a warning where other work may have kept the threads from running together."""
        busy = min(self.median_read_gb_per_s / self.read_gb_per_s, self.median_gflop_per_s / self.gflop_per_s) < BUSY
        return (
            f"limits of {self.threads} threads ({self.isa}): memory {self.read_gb_per_s:.1f} GB/s (median "
            f"{self.median_read_gb_per_s:.1f}), float32 {self.gflop_per_s:.0f} GFLOP/s (median "
            f"{self.median_gflop_per_s:.0f})" + (": the machine is busy, they may be higher" if busy else "")
        )


def measure_limits(threads: int, isa: str | None = None) -> Limits:
    """Measure for less than a second, with loops of `isa` (None: the widest of this machine).

    Raises `ValueError` where the library or the instruction set is missing, `MemoryError` where 128 MB are.
    """
    library = load_library()
    isa = chosen_isa(isa)
    library.ht_limits.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    found = np.zeros(4)
    if library.ht_limits(threads, ISAS.index(isa), found.ctypes.data):
        raise MemoryError(f"the limits of {threads} threads could not be measured")
    read, median_read, flops, median_flops = (round(float(value) / 1e9, 2) for value in found)
    return Limits(threads, isa, read, flops, median_read, median_flops)
