"""The tactics of products with panels, as the compiled library has them: `tactics.h`."""

from __future__ import annotations

import hashlib
from ctypes import c_char_p, c_int64
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from hybridtrt.plugins.native.library import TACTIC_RANGES, load_library

DEFAULT = "default"


@dataclass(frozen=True)
class Tactics:
    """All `names`, the default first. For each range of rows: those `worth_trying`, and the rows to try them with."""

    names: tuple[str, ...]
    worth_trying: tuple[tuple[str, ...], ...]
    typical_rows: tuple[int, ...]


@cache
def known_tactics() -> Tactics:
    """What the library knows. Raises `ValueError` where it is missing."""
    library = load_library()
    library.ht_tactic.argtypes, library.ht_tactic.restype = [c_int64], c_char_p
    library.ht_worth_trying.argtypes = [c_int64, c_int64]
    library.ht_typical_rows.argtypes, library.ht_typical_rows.restype = [c_int64], c_int64
    names: list[str] = []
    for i in count():
        name = library.ht_tactic(i)
        if name is None:
            break
        names.append(name.decode())
    ranges = range(TACTIC_RANGES)
    return Tactics(
        names=tuple(names),
        worth_trying=tuple(
            tuple(name for i, name in enumerate(names) if library.ht_worth_trying(i, which)) for which in ranges
        ),
        typical_rows=tuple(library.ht_typical_rows(which) for which in ranges),
    )


def range_of(rows: int) -> int:
    """The range that a product of so many rows falls into. Raises `ValueError` where the library is missing."""
    library = load_library()
    library.ht_range_of.argtypes, library.ht_range_of.restype = [c_int64], c_int64
    return int(library.ht_range_of(rows))


@cache
def kernel_digest() -> str:
    """A digest of the library: what was measured with it says nothing of another. Raises `ValueError` without one."""
    return hashlib.sha256(Path(load_library()._name).read_bytes()).hexdigest()[:16]
