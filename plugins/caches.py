"""What a layer keeps between steps: paged token caches and fixed-size recurrent states."""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1},
    **{"int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1},
}


@dataclass(frozen=True)
class PageSpec:
    """A paged cache of one layer, `[pages, page_size, *shape]`.

    Layers of one `group` share a block table: they hold the same tokens, and page `p` of the group is
    page `p` of each of their pools. Page 0 is reserved for padding.
    """

    name: str
    group: str
    shape: tuple[int, ...]  # of one token
    dtype: str = "float32"
    window: int | None = None  # tokens that can still be attended; None: all of them
    limit: int | None = None  # tokens from this position on are not kept; None: all are

    @property
    def bytes_per_token(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateSpec:
    """A recurrent state of one layer, `[slots, *shape]`, overwritten in place. Slot 0 is reserved for padding."""

    name: str
    shape: tuple[int, ...]  # of one sequence
    dtype: str = "float32"

    @property
    def bytes_per_slot(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


CacheSpec = PageSpec | StateSpec


def pages_held(tokens: int, page_size: int, window: int | None = None, limit: int | None = None, chunk: int = 1) -> int:
    """Most pages of one group that a sequence of `tokens` tokens holds at once.

    What sizes the pools and what admits requests both ask here, so that a sequence that fits the limits of an engine
    can always start. A step of up to `chunk` tokens needs the `window - 1` tokens before them; pages wholly before
    those are given back. So many tokens may begin in the middle of a page.
    """
    pages = -(-(tokens if limit is None else min(tokens, limit)) // page_size)
    return pages if window is None else min(pages, 1 - (-(window - 2 + chunk) // page_size))
