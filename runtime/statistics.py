"""Counters of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Counters:
    """What has happened since the engine started."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))


@dataclass(frozen=True)
class Usage:
    """Pages of one group, or slots; the reserved number 0 is not counted."""

    used: int
    free: int
    promised: int = 0  # part of `free` that is reserved by running requests


@dataclass(frozen=True)
class Statistics:
    """A snapshot. Token counts and `finished` (by reason) are totals since the start."""

    running: int
    waiting: int
    slots: Usage
    pages: Mapping[str, Usage]
    steps: int
    prefill_tokens: int  # tokens of prompts that were run
    decode_tokens: int  # sampled tokens that were run
    sampled_tokens: int
    finished: Mapping[str, int]
