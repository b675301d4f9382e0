"""The tactics that were found the fastest on this machine, kept for the next build."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("hybridtrt.tune")

Found = dict[str, dict[str, str]]  # of each machine: the tactic of each question


MOST_BYTES = 1 << 24  # of a cache
LOCK_SECONDS = 5.0


def default_cache_file() -> Path | None:
    """Among the user's caches: `hybridtrt/timing.json` in XDG_CACHE_HOME, or in ~/.cache; None without a home."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "hybridtrt" / "timing.json"


class TimingCache:
    """A JSON file that several builds may use at once. One that cannot be read or written is one warning, no error.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = Path(os.path.realpath(path or os.devnull))  # a link stays one
        self._warned = path is None

    def read(self, machine: str) -> dict[str, str]:
        """What is known of a machine."""
        return self._read().get(machine, {})

    def add(self, machine: str, found: Mapping[str, str]) -> None:
        """Add to what the file holds by now; it is replaced as a whole."""
        try:
            self._check()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                everything = self._read()
                everything[machine] = {**everything.get(machine, {}), **found}
                fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
                try:
                    fresh.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
                    fresh.replace(self._path)
                finally:
                    fresh.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"is not kept: {error}")

    def _read(self) -> Found:
        try:
            self._check()
            if self._path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
            everything = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"is ignored: {error}")
            return {}
        if not isinstance(everything, dict) or not all(_is_found(found) for found in everything.values()):
            self._warn("is ignored: it is not a timing cache")
            return {}
        return everything

    def _check(self) -> None:
        """Raise `OSError` for what is there but is no file: a device would be replaced, a pipe waited for."""
        if self._path.exists() and not self._path.is_file():
            raise OSError("it is no regular file")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._path.with_name(f".{self._path.name}.lock").open("a") as lock:
            end = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise OSError(f"another process has held its lock for {LOCK_SECONDS:g} s") from None
                    time.sleep(0.02)
            yield

    def _warn(self, message: str) -> None:
        if not self._warned:
            log.warning("the timing cache %s %s", self._path, message)
        self._warned = True


def _is_found(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(tactic, str) for tactic in found.values())
