"""Progress of long work: a bar with the rate on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_SECONDS = 5.0


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of bytes done and bytes in all."""
    if sys.stderr.isatty():
        shown = "{desc}: {percentage:3.0f}%|{bar}| {n:.2f} of {total:.2f} GB [{elapsed}<{remaining}, {rate_noinv_fmt}]"
        with tqdm(desc=label, total=0, unit="GB", unit_scale=1e-9, bar_format=shown, leave=True) as bar:

            def draw(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield draw
        return
    started = last = time.monotonic()
    printed = -1

    def print_line(done: int, total: int) -> None:
        nonlocal last, printed
        now = time.monotonic()
        if done != printed and (now - last >= LINE_SECONDS or done == total):
            last, printed = now, done
            rate = done / max(now - started, 1e-9) / 1e9
            print(f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate:.2f} GB/s", file=sys.stderr, flush=True)

    yield print_line


@contextmanager
def count_progress(label: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Yields a function to be called once a unit of work."""
    with tqdm(desc=label, total=total, unit=unit, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield lambda: bar.update() and None


def stage_progress(label: str) -> Callable[[str], None]:
    """A function to be told each stage of a work: one line each, with the seconds since the start."""
    started = time.monotonic()

    def show(stage: str) -> None:
        tqdm.write(f"{label}: {stage} ({time.monotonic() - started:.0f} s)", file=sys.stderr)  # beside a bar

    return show


def step_progress(label: str) -> Callable[[str, int, int], None]:
    """A function of a kind of work, steps done and all: a line for each kind, and more while it takes long."""
    started = time.monotonic()
    last = -LINE_SECONDS
    current = ""

    def show(what: str, done: int, total: int) -> None:
        nonlocal last, current
        now = time.monotonic()
        if what != current or now - last >= LINE_SECONDS or (done == total and total > 1):
            current, last = what, now
            print(f"{label}: {what}, {done} of {total} ({now - started:.0f} s)", file=sys.stderr, flush=True)

    return show
