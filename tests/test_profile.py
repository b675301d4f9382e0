"""The file of a profile: whole or not at all, ignored with one line when it is damaged or of another engine."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtrt.runtime.profile import (
    FORMAT,
    GroupBytes,
    Profile,
    RangeProfile,
    StepProfile,
    engine_identity,
    read_profile,
    write_profile,
)
from hybridtrt.runtime.runner import Costs

positive = st.floats(1e-9, 1e12)
steps = st.lists(
    st.builds(StepProfile, st.integers(1, 4096), positive, st.none() | positive), min_size=1, max_size=3
).map(tuple)
ranges = st.builds(
    RangeProfile,
    st.integers(0, 20).map(lambda bits: 1 << bits),
    st.integers(0, 100),
    st.lists(st.builds(GroupBytes, st.text(max_size=5), positive), max_size=2).map(tuple),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    positive,
)


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"version": "1"}')
    return tmp_path


def small_profile(engine_dir: Path) -> Profile:
    part = RangeProfile(64, 3, (GroupBytes("full", 7.5),), 640, 0, 0.25)
    prefill = (StepProfile(1, 0.01, None), StepProfile(64, 0.128, 3.5))
    return Profile(FORMAT, engine_identity(engine_dir), (part,), (StepProfile(1, 0.01, 2.0),), prefill, 2e9)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ranges, max_size=3).map(tuple), steps, steps, positive)
def test_what_is_written_is_read(
    engine_dir: Path,
    parts: tuple[RangeProfile, ...],
    decode: tuple[StepProfile, ...],
    prefill: tuple[StepProfile, ...],
    rate: float,
) -> None:
    profile = Profile(FORMAT, engine_identity(engine_dir), parts, decode, prefill, rate)
    write_profile(engine_dir, profile)
    assert read_profile(engine_dir) == profile
    assert {path.name for path in engine_dir.iterdir()} == {"config.json", "profile.json"}


def test_an_engine_without_a_profile_says_nothing(engine_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_profile(engine_dir) is None
    assert not caplog.records


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_one_warning(engine_dir: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject) -> None:
    path = write_profile(engine_dir, small_profile(engine_dir))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 2))
    junk = data.draw(st.binary(max_size=3).filter(lambda part: b"}" not in part))  # never whole again
    path.write_bytes(whole[:cut] + junk)
    caplog.clear()
    assert read_profile(engine_dir) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "profile.json is ignored" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "format=2: expected 1"),
        ({"engine": "another"}, "it was taken of another engine"),
        ({"prefill": []}, "prefill=[]: expected at least one step"),
        ({"copy_bytes_per_s": "fast"}, "profile.copy_bytes_per_s='fast': expected float"),
        ({"copy_bytes_per_s": 0.0}, "copy_bytes_per_s=0.0 is not positive"),
        ({"copy_bytes_per_s": 1e300}, "copy_bytes_per_s is not less than 1e+18"),
        ({"copy_bytes_per_s": 10**400}, "int too large"),
        ({"prefill": [{"tokens": 0, "seconds": 1.0, "active_experts": None}]}, "tokens=0 is not positive"),
        ({"ranges": [{"least": 3}]}, "missing or unknown field"),
        ({"extra": 1}, "missing or unknown field 'extra'"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    engine_dir: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object], reason: str
) -> None:
    path = write_profile(engine_dir, small_profile(engine_dir))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_profile(engine_dir) is None
    assert reason in caplog.text


def test_a_profile_does_not_survive_its_engine(engine_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_profile(engine_dir, small_profile(engine_dir))
    (engine_dir / "config.json").write_text('{"version": "2"}')
    assert read_profile(engine_dir) is None
    assert "it was taken of another engine" in caplog.text


def test_ranges_begin_at_powers_of_two(engine_dir: Path) -> None:
    with pytest.raises(ValueError, match="least=3 is not a power of two"):
        replace(small_profile(engine_dir).ranges[0], least=3)


def test_prefill_costs_what_it_does_in_the_largest_step(engine_dir: Path) -> None:
    assert small_profile(engine_dir).costs() == Costs(0.128 / 64, 2e9)
