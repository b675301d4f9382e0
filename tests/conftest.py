"""Settings of the whole suite."""

from __future__ import annotations

import os

# One thread a process: tests run in parallel processes, and tiny models lose more to a second thread than they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels in the Triton language run on CPU tensors, unless tests of a GPU are asked for; read when triton is imported.
if "gpu" not in os.environ.get("HYBRIDTRT_TESTS", ""):
    os.environ.setdefault("TRITON_INTERPRET", "1")
