"""The timing cache: shared by builds, and never worth more than a warning."""

from __future__ import annotations

import fcntl
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridtrt.build import timing_cache
from hybridtrt.build.timing_cache import TimingCache, default_cache_file
from hybridtrt.plugins.native.tactics import DEFAULT


def test_cache_of_several_builds_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timing.json"

    def build_one(i: int) -> None:
        cache = TimingCache(path)
        for j in range(10):
            cache.add(f"machine {i % 2}", {f"question {i} {j}": DEFAULT})
            cache.read("machine 0")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(build_one, range(8)))
    for which in (0, 1):
        keys = {f"question {i} {j}" for i in range(which, 8, 2) for j in range(10)}
        assert TimingCache(path).read(f"machine {which}") == dict.fromkeys(keys, DEFAULT)
    assert TimingCache(path).read("machine 2") == {}
    assert {file.name for file in path.parent.iterdir()} == {"timing.json", ".timing.json.lock"}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        b"[]",
        b'{"machine": ["default"]}',
        b'{"machine": {"question": 1}}',
        b"[" * 100_000,
        b" " * (1 << 25),
    ],
    ids=range(7),
)
def test_a_damaged_cache_is_one_warning(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(content)
    cache = TimingCache(path)
    assert cache.read("machine") == {}
    cache.add("machine", {"question": "streamed"})
    assert TimingCache(path).read("machine") == cache.read("machine") == {"question": "streamed"}
    (record,) = caplog.records
    assert (record.levelno, "timing.json is ignored" in record.getMessage()) == (logging.WARNING, True)


def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = TimingCache(tmp_path / "file" / "timing.json")
    for _ in range(2):
        cache.add("machine", {"question": DEFAULT})
    (record,) = caplog.records
    assert "timing.json is not kept" in record.getMessage()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_left_alone(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / kind
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = path.stat()
    cache = TimingCache(path)
    assert cache.read("machine") == {}
    cache.add("machine", {"question": DEFAULT})
    (record,) = caplog.records
    assert "it is no regular file" in record.getMessage()
    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
    assert {file.name for file in tmp_path.iterdir()} == {kind}


def test_a_link_to_a_cache_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    TimingCache(tmp_path / "link").add("machine", {"question": DEFAULT})
    assert (tmp_path / "link").is_symlink()
    assert TimingCache(tmp_path / "file").read("machine") == {"question": DEFAULT}


def test_a_lock_that_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timing_cache, "LOCK_SECONDS", 0.1)
    with (tmp_path / ".timing.json.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        TimingCache(tmp_path / "timing.json").add("machine", {"question": DEFAULT})
    (record,) = caplog.records
    assert "another process has held its lock" in record.getMessage()
    assert not (tmp_path / "timing.json").exists()


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    cache = TimingCache(default_cache_file())
    cache.add("machine", {"question": DEFAULT})
    assert (cache.read("machine"), caplog.records) == ({}, [])


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_file() == Path("/caches/hybridtrt/timing.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_file() == Path.home() / ".cache/hybridtrt/timing.json"
