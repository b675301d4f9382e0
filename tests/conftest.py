"""Settings of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# One thread a process: tests run in parallel processes, and tiny models lose more to a second thread than they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """Kernels in the Triton language run on CPU tensors, by its interpreter, but for the tests that need a GPU."""
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` needs torch and triton alone, so it does not import the files of the other tests."""
    others = collection_path.name.startswith("test_") and collection_path.name != "test_on_gpu.py"
    return True if others and config.getoption("markexpr") == "gpu" else None
