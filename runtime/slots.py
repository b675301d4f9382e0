"""The state slots: who reads and writes each one, how many tokens its states have seen, and which are snapshots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class SlotRecord:
    """Who holds a slot, and the key of its tokens if its states are a snapshot."""

    holders: list[str] = field(default_factory=list)
    key: bytes | None = None


class SlotPool:
    """Hands out slots `1..num_slots-1`; slot 0 is the state of padding and is never handed out.

    A slot can be registered as a snapshot of a prefix; once nobody holds it, it stays until its room is needed, least
    recently used first. `lost` collects slots whose states are gone, for whoever poisons them.

    Of each slot, `[num_slots]`: it holds the states after `tokens` tokens, and was taken `generations` times.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}: slot 0 is reserved, at least 2 are needed")
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, 0, -1))
        self.records = [SlotRecord() for _ in range(num_slots)]
        self.tokens = np.zeros(num_slots, np.int32)
        self.generations = np.zeros(num_slots, np.int32)
        self.lost: list[int] = []
        self._snapshots: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # snapshots that nobody holds, least recently used first

    @property
    def usable(self) -> int:
        """Slots that can be held at once."""
        return self.num_slots - 1

    @property
    def cached(self) -> int:
        """Snapshots that nobody holds."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Slots that somebody holds."""
        return self.usable - len(self.free) - len(self._idle)

    @property
    def available(self) -> int:
        """Slots that can be taken."""
        return len(self.free) + len(self._idle)

    def take(self, owner: str, tokens: int = 0) -> tuple[int, int]:
        """Give a slot to an owner: its number and its generation.

        `tokens` is what its states will have seen when they are first read: they must be zeroed or written before.
        """
        slot = self.free.pop() if self.free else self._evict()
        self.generations[slot] += 1
        self.tokens[slot] = tokens
        self.records[slot].holders.append(owner)
        return slot, int(self.generations[slot])

    def hold(self, slot: int, owner: str) -> int:
        """Let one more owner read a slot, and return its generation."""
        self._idle.pop(slot, None)
        self.records[slot].holders.append(owner)
        return int(self.generations[slot])

    def check(self, slot: int, owner: str, generation: int, tokens: int) -> None:
        """Raise `RuntimeError` unless the slot holds this owner's states after exactly `tokens` tokens."""
        seen, taken, holders = self.tokens[slot], self.generations[slot], self.records[slot].holders
        if seen != tokens or taken != generation or owner not in holders:
            raise RuntimeError(
                f"slot {slot} of {holders} (generation {taken}) holds states after {seen} tokens; "
                f"expected {owner!r} (generation {generation}) after {tokens} tokens"
            )

    def drop(self, slot: int, owner: str, generation: int) -> bool:
        """Take a slot back from an owner. False, and nothing is changed, when it is not this owner's any more."""
        record = self.records[slot]
        if self.generations[slot] != generation or owner not in record.holders:
            return False
        record.holders.remove(owner)
        if not record.holders:
            if record.key is None:
                self.free.append(slot)
                self.lost.append(slot)
            else:
                self._idle[slot] = None
        return True

    def register(self, slot: int, key: bytes) -> bool:
        """Make a slot that somebody holds the snapshot of a prefix. False when there is one already."""
        if key in self._snapshots or self.records[slot].key is not None:
            return False
        self._snapshots[key] = slot
        self.records[slot].key = key
        return True

    def find(self, key: bytes, tokens: int) -> int:
        """The snapshot of a prefix of `tokens` tokens, 0 if there is none."""
        slot = self._snapshots.get(key, 0)
        return slot if self.tokens[slot] == tokens else 0

    def forget(self, slot: int) -> None:
        """A slot that somebody holds is no snapshot any more: its states are about to be overwritten."""
        key = self.records[slot].key
        if key is not None:
            del self._snapshots[key]
            self.records[slot].key = None

    def _evict(self) -> int:
        slot, _ = self._idle.popitem(last=False)
        self.forget(slot)
        self.lost.append(slot)
        return slot

    def take_lost(self) -> list[int]:
        """The slots that lost their states since the last call."""
        lost, self.lost = self.lost, []
        return lost

    def faults(self, holders: Collection[tuple[int, str]]) -> list[str]:
        """What is wrong with the accounts if `holders` (slot and owner) are all that live, one line a fault."""
        faults = []
        expected = Counter(holders)
        for slot, record in enumerate(self.records):
            for owner in set(record.holders):
                if record.holders.count(owner) > expected[slot, owner]:
                    faults.append(f"slot {slot} is held by {owner!r}, which is gone or has another one")
            places = (slot in self.free) + (slot in self._idle) + bool(record.holders)
            if places != (slot > 0):
                faults.append(f"slot {slot} is in {places} of: the free list, the snapshots, a sequence")
            if record.key is not None and self._snapshots.get(record.key) != slot:
                faults.append(f"the snapshot in slot {slot} cannot be found")
        for slot, owner in expected:
            if owner not in self.records[slot].holders:
                faults.append(f"slot {slot} of {owner!r} is not held by it")
        if len(set(self.free)) != len(self.free):
            faults.append(f"the free list of slots is damaged: {sorted(self.free)}")
        if any(self.records[slot].key != key for key, slot in self._snapshots.items()):
            faults.append("the keys of snapshots do not name them")
        return faults
