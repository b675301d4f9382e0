"""Which prefixes are cached: keys by content, the longest hit, and where snapshots of states are worth their slots.

A prefix of n tokens can be reused where every page group has its pages (of a window: those that the next token sees)
and, in a model with recurrent layers, a slot holds the states after exactly n tokens. n is a multiple of the page size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Row
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.slots import SlotPool

NEVER = 1 << 62
MIN_PAGES = 2  # a snapshot at a prompt's end costs its request one more step: it must save others at least so much
MAX_SEEN = 1 << 16  # boundaries of earlier prompts that are remembered
KEY_BYTES = 16


@dataclass(frozen=True)
class Hit:
    """A cached prefix of `tokens` tokens: by group the first page that is needed and the pages from there on."""

    tokens: int = 0
    slot: int = 0  # of its states, 0 in a model without
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()


def extend_keys(keys: list[bytes], tokens: NDArray[np.int32], page_size: int, salt: str) -> None:
    """Append the key of every full page of `tokens` [N], which follow the pages that have keys.

    Each names the page and all before it.
    """
    before = keys[-1] if keys else blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"salt").digest()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        before = blake2b(before + tokens[start : start + page_size].tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(before)


class PrefixCache:
    """Finds hits in the pools. `interval` is the distance of regular snapshots in tokens."""

    def __init__(self, pools: Row[PagePool], slots: SlotPool | None, page_size: int, interval: int) -> None:
        self.pools, self.slots, self.page_size = pools, slots, page_size
        self._interval = max(interval // page_size, 1) * page_size
        self.nothing = Hit(pages=tuple((0, ()) for _ in pools))
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def find(self, keys: Row[bytes], tokens: int) -> Hit:
        """The longest hit for a sequence of `tokens` tokens with these page keys, of which the last must run."""
        count = min(len(keys), (tokens - 1) // self.page_size)
        for pool in self.pools:
            if pool.window is None:
                count = self._leading(pool, keys, count)
        while count > (longest := self._longest(keys, count)):
            count = longest
        if not count:
            return self.nothing
        slot = self.slots.find(keys[count - 1], count * self.page_size) if self.slots else 0
        return Hit(count * self.page_size, slot, tuple(self._pages(pool, keys, count) for pool in self.pools))

    def junction(self, keys: Row[bytes], tokens: int) -> int:
        """Tokens that the prompt shares with an earlier one, in whole pages; then remember this prompt too."""
        shared = 0
        for count, key in enumerate(keys[: (tokens - 1) // self.page_size], 1):
            if key in self._seen:
                shared = count * self.page_size
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return shared

    def next_snapshot(self, after: int, junction: int, prompt: int) -> int:
        """The next place beyond `after` tokens where a snapshot is worth its slot."""
        places = [(after // self._interval + 1) * self._interval]
        last = (prompt - 1) // self.page_size * self.page_size
        if last - after >= MIN_PAGES * self.page_size:
            places.append(last)
        if junction > after:
            places.append(junction)
        return min(places)

    @staticmethod
    def _leading(pool: PagePool, keys: Row[bytes], most: int) -> int:
        """Tokens beyond the pool's limit have no pages, so its pages do not bound the hit there."""
        end = most if pool.limit is None else min(most, pool.end(pool.limit))
        for i in range(end):
            if not pool.find(keys[i]):
                return i
        return most

    def _longest(self, keys: Row[bytes], count: int) -> int:
        """`count` pages if the states and windows behind them are there; else the most that a shorter hit may have."""
        tokens = count * self.page_size
        if count and self.slots and not self.slots.find(keys[count - 1], tokens):
            return count - 1
        for pool in self.pools:
            if pool.window is not None:
                for i in range(pool.end(tokens) - 1, pool.first(tokens) - 1, -1):
                    if not pool.find(keys[i]):
                        return i
        return count

    @staticmethod
    def _pages(pool: PagePool, keys: Row[bytes], count: int) -> tuple[int, tuple[int, ...]]:
        tokens = count * pool.page_size
        first = pool.first(tokens)
        return first, tuple(pool.find(key) for key in keys[first : pool.end(tokens)])
