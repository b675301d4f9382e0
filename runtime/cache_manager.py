"""Slots and pages of the running sequences: one place that gives them out and takes them back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.slots import SlotPool

MAX_NAMED = 20  # faults in one message


@dataclass(frozen=True)
class Freed:
    """What a sequence gave back."""

    pages: dict[str, list[int]]
    slots: list[int]


class CacheManager:
    """Admits a sequence when a slot and all pages that it may ever need can be had, so that it always runs to its end.

    A model without recurrent layers has slots all the same: they number the rows and their records are checked, but
    nobody stores anything in them.
    """

    def __init__(self, info: RunnerInfo) -> None:
        groups = {spec.group: spec.limit for spec in info.caches if isinstance(spec, PageSpec)}
        missing = [group for group in groups if group not in info.num_pages]
        if missing:
            raise ValueError(f"num_pages={dict(info.num_pages)} lacks page groups {missing}")
        self.has_states = any(isinstance(spec, StateSpec) for spec in info.caches)
        self.page_size = info.page_size
        self.pools = [PagePool(group, info.num_pages[group], info.page_size, limit) for group, limit in groups.items()]
        self.slots = SlotPool(info.num_slots if self.has_states else info.max_batch_size + 1)

    def check_fits(self, tokens: int) -> None:
        """Raise `ValueError` when `tokens` tokens do not fit even into empty pools."""
        for pool in self.pools:
            if pool.pages_for(tokens) > pool.usable:
                raise ValueError(
                    f"{tokens} tokens need {pool.pages_for(tokens)} pages of {pool.page_size} tokens, "
                    f"but page group {pool.group!r} has {pool.usable}"
                )

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether a slot is free and all pages that the sequence may need can be reserved."""
        tokens = sequence.max_cached
        return bool(self.slots.free) and all(pool.can_reserve(pool.pages_for(tokens)) for pool in self.pools)

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot, whose states the caller must zero, and reserve its pages."""
        sequence.slot, sequence.generation = self.slots.take(sequence.id)
        for pool in self.pools:
            sequence.pages[pool.group] = pool.reserve(sequence.id, pool.pages_for(sequence.max_cached))

    def prepare(self, sequence: Sequence, count: int) -> None:
        """Make a running sequence ready for `count` more tokens, with pages as needed.

        Raises `RuntimeError` when its slot does not hold its states after exactly its computed tokens.
        """
        self.slots.check(sequence.slot, sequence.request.id, sequence.generation, sequence.computed)
        tokens = sequence.computed + count
        if tokens > sequence.capacity:
            for pool in self.pools:
                pool.take(sequence.id, pool.pages_for(tokens) - len(sequence.pages[pool.group]))
            sequence.capacity = -(-tokens // self.page_size) * self.page_size

    def release(self, sequence: Sequence) -> Freed:
        """Take the slot and the pages back."""
        pages = {pool.group: pool.release(sequence.id) for pool in self.pools}
        mine = self.slots.release(sequence.slot, sequence.id, sequence.generation)
        freed = Freed(pages, [sequence.slot] if mine else [])
        sequence.slot, sequence.capacity, sequence.pages = 0, 0, {}
        return freed

    def check_integrity(self, owners: Collection[str]) -> None:
        """Raise `RuntimeError`, naming the faults, unless every page and slot is free or held by one of `owners`."""
        faults = [fault for pool in self.pools for fault in pool.faults(owners)] + self.slots.faults(owners)
        if faults:
            more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
            raise RuntimeError(f"caches are damaged: {'; '.join(faults[:MAX_NAMED])}{more}")
