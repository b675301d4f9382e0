"""Progress of long work: a bar on a terminal, a few plain lines elsewhere, and never a word on standard output."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from hybridtrt import progress
from hybridtrt.progress import LINE_SECONDS, byte_progress, count_progress

SECONDS = 22.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand reports over 22 seconds make a line every `LINE_SECONDS`, and one when all is done."""
    now = started = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    total = 2_000_000_000
    with byte_progress("copy") as report:
        for i in range(1, 1001):
            now = started + SECONDS * i / 1000
            report(i * total // 1000, total)
        report(total, total)  # once more changes nothing
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert len(lines) == SECONDS // LINE_SECONDS + 1
    assert lines[0] == "copy: 456 of 2000 MB, 0.09 GB/s"
    assert lines[-1] == "copy: 2000 of 2000 MB, 0.09 GB/s"


def test_bar_of_bytes_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with byte_progress("copy") as report:
        for done in (10_000_000, 1_000_000_000, 2_500_000_000):
            report(done, 2_500_000_000)
    last = screen.getvalue().split("\r")[-1]
    assert last.startswith("copy: 100%")
    assert "2.50 of 2.50 GB" in last
    assert "GB/s" in last
    assert capsys.readouterr().out == ""


def test_bar_of_units_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    with count_progress("bench", 3, "token") as advance:
        assert "bench:   0%" in screen.getvalue()
        assert "0/3" in screen.getvalue()
        for _ in range(3):
            advance()
    assert capsys.readouterr().out == ""


def test_no_bar_of_units_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with count_progress("bench", 3, "token") as advance:
        advance()
    assert capsys.readouterr() == ("", "")
