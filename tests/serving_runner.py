"""Runner factories for engine processes that tests start: `serving_runner:fast` and so on."""

from __future__ import annotations

import os
import time

from null_runner import NullRunner, null_info

INFO = null_info(
    vocab_size=512, max_batch_size=64, max_num_tokens=512, max_seq_len=2048, page_size=16,
    num_pages={"full": 4097, "window": 4097}, num_slots=65,
)  # fmt: skip


def fast(engine_dir):
    """No wait in a step."""
    return runner(0.0)


def steady(engine_dir):
    """A step takes 5 ms."""
    return runner(0.005)


def crashing(engine_dir):
    """The process ends in its first step."""
    return NullRunner(INFO, on_step=lambda batch: os._exit(7))


def runner(step_seconds):
    null = NullRunner(INFO, on_step=lambda batch: time.sleep(step_seconds))
    null.batches = Forgetful()
    return null


class Forgetful(list):
    """A server steps for long: nothing is kept."""

    def append(self, item):
        pass
