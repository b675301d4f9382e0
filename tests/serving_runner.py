"""Engines without a network for servers that tests start: `serving_runner:steady` and so on are runner factories."""

from __future__ import annotations

import os
import time
from pathlib import Path

from null_runner import NullRunner, null_info
from tokenizers_for_tests import byte_level, kept

TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
INFO = null_info(
    vocab_size=420,
    max_batch_size=64,
    max_num_tokens=512,
    max_seq_len=4096,
    page_size=16,
    num_pages={"full": 4097, "window": 4097},
    num_slots=65,
)


def steady(engine_dir: Path) -> NullRunner:
    """A step takes 5 ms and longer."""
    return make(0.005)


def crashing(engine_dir: Path) -> NullRunner:
    """The process ends in its first step."""
    return NullRunner(INFO, on_step=lambda batch: os._exit(7))


def unloadable(engine_dir: Path) -> NullRunner:
    raise ValueError(f"{engine_dir}/config.json: built by version 99, this is version 0.1.0; build the engine again")


def make(step_seconds: float) -> NullRunner:
    runner = NullRunner(INFO, on_step=lambda batch: time.sleep(step_seconds))
    runner.batches = Nothing()
    return runner


def engine_folder(folder: Path, text: bool = True) -> Path:
    """A folder that the factories can be called with, with a tokenizer and a chat template."""
    folder.mkdir()
    if text:
        kept(byte_level(), TEMPLATE).save(folder / "tokenizer")
    return folder


class Nothing(list):  # type: ignore[type-arg]
    """Keeps nothing: a server steps for long."""

    def append(self, item: object) -> None:
        pass
