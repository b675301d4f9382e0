"""Hybrid LLM checkpoints to engines with in-flight batching, served by Triton Inference Server."""

import os

__version__ = "0.1.0"

# By default libgomp's threads spin for milliseconds at the end of a parallel region. When other processes want the
# cores, they then take the time that the last thread needs: decoding falls to a tenth. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
