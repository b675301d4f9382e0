"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder beside `target` that takes its place when the block ends well, and vanishes otherwise.

    An existing target is replaced only if it is empty or `ours(target)`; anything else is a `ValueError`.
    """
    if target.exists() and not ours(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target}: exists and was not written by hybridtrt; it is left as it is")
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    for left in target.parent.glob(f".{target.name}.*.new"):  # by a process that was killed
        if not _runs(left.name.removesuffix(".new").rpartition(".")[2]):
            shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _runs(process: str) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (PermissionError, ValueError):
        pass
    return True
