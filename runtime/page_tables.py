"""The pages of running sequences, in all page groups at once."""

from __future__ import annotations

from collections.abc import Sequence as Items

from hybridtrt.converters.memory import cache_memory
from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sequence import Sequence

Cached = Items[tuple[int, Items[int]]]  # by group: the first page that a sequence begins with, and the pages
Copies = dict[str, list[tuple[int, int]]]  # pages to copy, (source, target) by group


class PageTables:
    """`reserve`: a sequence begins only with a promise of all pages that it may ever need."""

    def __init__(self, info: RunnerInfo, reserve: bool, admission: Admission) -> None:
        groups = cache_memory(info.caches).groups
        missing = [name for name in groups if name not in info.num_pages]
        if missing:
            raise ValueError(f"num_pages={dict(info.num_pages)} lacks page groups {missing}")
        self.pools = [
            PagePool(name, info.num_pages[name], info.page_size, group.window, group.limit, info.max_num_tokens)
            for name, group in groups.items()
        ]
        self.page_size = info.page_size
        self._reserve, self._admission = reserve, admission
        self._page_bytes = [info.page_size * group.bytes_per_token for group in groups.values()]

    def check_fits(self, tokens: int) -> None:
        """Raise `ValueError` when `tokens` tokens do not fit even into empty pools."""
        for pool in self.pools:
            if (pages := pool.most_pages(tokens)) > pool.usable:
                raise ValueError(
                    f"{tokens} tokens need {pages} pages of {pool.page_size} tokens, "
                    f"but page group {pool.group!r} has {pool.usable}"
                )

    def begin(self, sequence: Sequence, computed: int, cached: Cached) -> bool:
        """Let a sequence begin with pages of its first `computed` tokens, if those that are to come have room."""
        terms = [self._terms(sequence, pool, pages) for pool, (_, pages) in zip(self.pools, cached, strict=True)]
        for pool, (quota, expected, needed) in zip(self.pools, terms, strict=True):
            if max(quota, needed) > pool.available or (expected and pool.expected + expected > pool.usable):
                return False
        for pool, (first, pages), (quota, expected, _) in zip(self.pools, cached, terms, strict=True):
            holding = pool.open(sequence.name, quota, expected)
            pool.skip(holding, first)
            pool.share(holding, pages)
            sequence.holdings.append(holding)
        sequence.capacity = -(-computed // self.page_size) * self.page_size
        sequence.registered = computed // self.page_size * self.page_size
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for `tokens` tokens in all, and give back pages before the windows; false when there is none."""
        self.trim(sequence)
        wanted = []
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            if (count := pool.end(tokens) - len(holding.pages)) > 0:
                if not pool.can_take(holding, count):
                    return False
                wanted.append((pool, holding, count))
        for pool, holding, count in wanted:
            pool.take(holding, count)
        sequence.capacity = -(-tokens // self.page_size) * self.page_size
        return True

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages before the window of the next token."""
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            if (first := pool.first(sequence.computed)) > holding.start:
                pool.trim(holding, first)

    def fork(self, leader: Sequence, follower: Sequence) -> Copies | None:
        """Let a follower begin with the pages of its leader: full ones are shared, the last one is to be copied."""
        shared = [pool.full_pages(leader.computed) for pool in self.pools]
        held = list(zip(leader.holdings, shared, strict=True))
        cached = [(holding.start, holding.pages[holding.start : count]) for holding, count in held]
        if not self.begin(follower, leader.computed, cached):
            return None
        copies = {}
        for pool, holding, (its, count) in zip(self.pools, follower.holdings, held, strict=True):
            pool.take(holding, pool.end(leader.computed) - count)
            copies[pool.group] = list(zip(its.pages[count : len(holding.pages)], holding.pages[count:], strict=True))
        return copies

    def register(self, sequence: Sequence) -> None:
        """Let others find the pages that have become full; `sequence.keys` has theirs."""
        for i in range(sequence.registered // self.page_size, sequence.computed // self.page_size):
            for pool, holding in zip(self.pools, sequence.holdings, strict=True):
                if i < len(holding.pages):
                    pool.register(holding.pages[i], sequence.keys[i])
        sequence.registered = sequence.computed // self.page_size * self.page_size

    def num_bytes(self, sequence: Sequence) -> int:
        """Bytes of the pages of what a sequence has computed."""
        pages = zip(self.computed(sequence).values(), self._page_bytes, strict=True)
        return sum(len(held) * num_bytes for held, num_bytes in pages)

    def computed(self, sequence: Sequence) -> dict[str, list[int]]:
        """The pages of what a sequence has computed, by group: it may hold more for tokens that are to come."""
        held = zip(self.pools, sequence.holdings, strict=True)
        return {pool.group: holding.pages[holding.start : pool.end(sequence.computed)] for pool, holding in held}

    def release(self, sequence: Sequence) -> None:
        """Take the pages back."""
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            pool.close(holding)
        sequence.holdings, sequence.capacity = [], 0

    def faults(self, running: Items[Sequence]) -> list[str]:
        """What is wrong with the accounts, one line a fault."""
        return [
            fault
            for i, pool in enumerate(self.pools)
            for fault in pool.faults([sequence.holdings[i] for sequence in running])
        ]

    def _terms(self, sequence: Sequence, pool: PagePool, cached: Items[int]) -> tuple[int, int, int]:
        """What a sequence begins on: promised pages, expected pages, and pages that it needs soon.

        Pages that others hold need no room, except behind a window: there they may give them back at any time.
        """
        shared = sum(map(pool.is_held, cached)) if pool.window is None else 0
        if self._reserve:
            return pool.most_pages(sequence.max_cached) - shared, 0, 0
        left = sequence.max_total - sequence.total
        expected = self._admission.expected_pages(pool.group, sequence.total, left) - shared
        return 0, max(expected, 0), pool.most_pages(sequence.total) - shared
