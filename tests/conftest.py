"""Settings of the whole suite."""

from __future__ import annotations

import os

# One thread a process: tests run in parallel processes, and tiny models lose more to a second thread than they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
