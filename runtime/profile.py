"""What a sample load showed of an engine: `profile.json` in its folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hybridtrt.build.engine import CONFIG_FILE
from hybridtrt.converters.plain_data import from_plain, to_plain
from hybridtrt.runtime.runner import Costs

PROFILE_FILE = "profile.json"
FORMAT = 1
MOST = 1e18  # of any figure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupBytes:
    """Bytes that a request holds in one page group for each token of prompt + max_tokens, on average over its life."""

    group: str
    bytes_per_token: float

    def __post_init__(self) -> None:
        _check_positive(self, "bytes_per_token")


@dataclass(frozen=True)
class RangeProfile:
    """Requests whose prompt + max_tokens is in `least .. 2 * least - 1`, a power of two and what comes before the next.

    What a request asked for is the measure, so one that ends before its max_tokens lowers `bytes_per_token`.
    """

    least: int
    requests: int
    pages: tuple[GroupBytes, ...]
    state_bytes: int  # of one request
    peak_chunk_bytes: int  # memory above weights and pools in the largest step
    time_to_first_token: float  # seconds, mean

    def __post_init__(self) -> None:
        if self.least < 1 or self.least & (self.least - 1):
            raise ValueError(f"least={self.least} is not a power of two")


@dataclass(frozen=True)
class StepProfile:
    """A step of `tokens` rows of one token, or of one row of `tokens` tokens."""

    tokens: int
    seconds: float
    active_experts: float | None  # experts with a token, mean over the MoE layers; None without such layers

    def __post_init__(self) -> None:
        _check_positive(self, "tokens", "seconds")


@dataclass(frozen=True)
class Profile:
    """Figures of one engine. `engine` identifies it: another build is another engine."""

    format: int
    engine: str
    ranges: tuple[RangeProfile, ...]
    decode: tuple[StepProfile, ...]
    prefill: tuple[StepProfile, ...]
    copy_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_positive(self, "copy_bytes_per_s")

    def bytes_per_token(self) -> dict[tuple[str, int], float]:
        """By page group and by the bit length of prompt + max_tokens, so that a look-up is O(1)."""
        return {
            (pages.group, part.least.bit_length()): pages.bytes_per_token
            for part in self.ranges
            for pages in part.pages
        }

    def costs(self) -> Costs:
        """What preempting costs; prefill as in its largest step."""
        largest = max(self.prefill, key=lambda step: step.tokens)
        return Costs(largest.seconds / largest.tokens, self.copy_bytes_per_s)


def _check_positive(value: object, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if number <= 0:
            raise ValueError(f"{name}={number} is not positive")
        if number >= MOST:
            raise ValueError(f"{name} is not less than {MOST:g}")


def engine_identity(engine_dir: Path) -> str:
    """A digest of the engine's description: its model, its limits and the version that built it."""
    return hashlib.sha256((engine_dir / CONFIG_FILE).read_bytes()).hexdigest()


def write_profile(engine_dir: Path, profile: Profile) -> Path:
    """Write `profile.json`, whole or not at all, and return its path."""
    path = engine_dir / PROFILE_FILE
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(to_plain(profile), indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def read_profile(engine_dir: Path) -> Profile | None:
    """The profile of an engine, if it has one. One that is damaged or of another engine is ignored with a warning."""
    path = engine_dir / PROFILE_FILE
    if not path.exists():
        return None
    try:
        profile: Profile = from_plain(Profile, json.loads(path.read_text(encoding="utf-8")), "profile")
        if profile.format != FORMAT:
            raise ValueError(f"format={profile.format}: expected {FORMAT}")
        if profile.engine != engine_identity(engine_dir):
            raise ValueError("it was taken of another engine")
        if not profile.prefill:
            raise ValueError("prefill=[]: expected at least one step")
    except (ValueError, OSError, OverflowError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        reason = " ".join(str(error).split())
        log.warning("%s is ignored: %s; run `hybridtrt profile` again", path, reason)
        return None
    return profile
