"""The state slots: who owns each one and how many tokens its states have seen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class SlotRecord:
    """What is in a slot: the states of `owner` after `tokens` tokens. `generation` counts the owners so far."""

    owner: str | None = None
    generation: int = 0
    tokens: int = 0


class SlotPool:
    """Hands out slots `1..num_slots-1`; slot 0 is the state of padding and is never handed out."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}: slot 0 is reserved, at least 2 are needed")
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, 0, -1))
        self.records = [SlotRecord() for _ in range(num_slots)]

    @property
    def usable(self) -> int:
        """Slots that can be held at once."""
        return self.num_slots - 1

    @property
    def used(self) -> int:
        """Slots that are held now."""
        return self.usable - len(self.free)

    def take(self, owner: str) -> tuple[int, int]:
        """Give a slot to an owner: its number and its generation. Its states must be zeroed before they are read."""
        slot = self.free.pop()
        record = self.records[slot]
        record.owner, record.generation, record.tokens = owner, record.generation + 1, 0
        return slot, record.generation

    def check(self, slot: int, owner: str, generation: int, tokens: int) -> None:
        """Raise `RuntimeError` unless the slot holds this owner's states after exactly `tokens` tokens."""
        record = self.records[slot]
        if record.tokens != tokens or record.generation != generation or record.owner != owner:
            raise RuntimeError(
                f"slot {slot} holds {record.owner!r} (generation {record.generation}) after {record.tokens} tokens; "
                f"expected {owner!r} (generation {generation}) after {tokens} tokens"
            )

    def advance(self, slot: int, tokens: int) -> None:
        """Record that a step has run `tokens` more tokens through the states of a slot."""
        self.records[slot].tokens += tokens

    def release(self, slot: int, owner: str, generation: int) -> bool:
        """Take a slot back. False, and nothing is changed, when it is not this owner's any more."""
        record = self.records[slot]
        if record.owner != owner or record.generation != generation:
            return False
        record.owner, record.tokens = None, 0
        self.free.append(slot)
        return True

    def faults(self, owners: Collection[str]) -> list[str]:
        """What is wrong with the accounts if `owners` are all that live, one line a fault; empty when all is well."""
        faults = []
        free = set(self.free)
        if len(free) != len(self.free) or not free <= set(range(1, self.num_slots)):
            faults.append(f"the free list of slots is damaged: {sorted(self.free)}")
        for slot, record in enumerate(self.records):
            if record.owner is not None and slot in free:
                faults.append(f"slot {slot} is free and held by {record.owner!r}")
            elif record.owner is not None and record.owner not in owners:
                faults.append(f"slot {slot} is held by {record.owner!r}, which is gone")
            elif record.owner is None and slot not in free and slot != 0:
                faults.append(f"slot {slot} is neither free nor held")
        return faults
