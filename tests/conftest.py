"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest

# One thread a process: tests run in parallel processes, and tiny models lose more to a second thread than they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """Kernels in the Triton language run on CPU tensors, by its interpreter, but for the tests that need a GPU."""
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
