"""The recurrent states of running sequences: which slot each one reads and which it writes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.step import Int32
from hybridtrt.runtime.rows import Numbers
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.slots import SlotPool


class States:
    """A sequence holds one slot, and a second one to write until the next commit when it must not overwrite what it
    reads: a snapshot that it begins with or leaves behind, its leader's states, or its own while drafts are tried.

    When drafts were wrong nothing is committed, and the next step reads the same states again.
    """

    def __init__(self, num_slots: int, num_bytes: int) -> None:
        self.slots = SlotPool(num_slots)
        self.num_bytes = num_bytes  # of one slot in all layers

    def has_room(self, count: int = 1) -> bool:
        """Whether `count` slots can be taken."""
        return self.slots.available >= count

    def begin(self, sequence: Sequence, snapshot: int = 0, tokens: int = 0) -> None:
        """Take a slot, to go on from a snapshot if there is one; else the runner must write states after `tokens`.

        Where the snapshot is the only slot that can be had, it is overwritten.
        """
        slots = self.slots
        if snapshot:
            sequence.source, sequence.source_generation = snapshot, slots.hold(snapshot, sequence.name)
            if slots.available:
                sequence.target, sequence.target_generation = slots.take(sequence.name)
                return
            slots.forget(snapshot)
        else:
            sequence.source, sequence.source_generation = slots.take(sequence.name, tokens)
        sequence.target, sequence.target_generation = sequence.source, sequence.source_generation

    def check(self, sequence: Sequence) -> None:
        """Raise `RuntimeError` where they are not sound, or not this sequence's."""
        self.slots.check(sequence.source, sequence.name, sequence.source_generation, sequence.computed)

    def part(self, sequence: Sequence) -> bool:
        """Give a sequence a second slot to write, so that the one it reads stays as it is; false if there is none."""
        if sequence.source != sequence.target:
            return True
        if not self.slots.available:
            return False
        sequence.target, sequence.target_generation = self.slots.take(sequence.name)
        return True

    def leave_snapshot(self, sequence: Sequence, key: bytes) -> None:
        """Let what a sequence reads stay behind as a snapshot, if there is a slot and none of this prefix yet."""
        if sequence.source == sequence.target and self.slots.available and self.slots.register(sequence.source, key):
            self.part(sequence)

    def share(self, leader: Sequence, follower: Sequence) -> None:
        """Let a follower read the states of its leader; each writes its own slot from now on."""
        self.part(leader)
        follower.source = leader.source
        follower.source_generation = self.slots.hold(leader.source, follower.name)
        follower.target, follower.target_generation = self.slots.take(follower.name)

    def sound(self, now: Numbers) -> NDArray[np.bool_]:
        """Of each row [N] whether the slot that it reads has its states after its computed tokens."""
        source = now.source.astype(np.intp)
        tokens, generations = self.slots.tokens[source], self.slots.generations[source]
        return np.asarray((tokens == now.computed) & (generations == now.source_generation))

    def holds(self, slot: int, generation: int, tokens: int) -> bool:
        """Whether a slot has, of this generation, the states after so many tokens."""
        return bool(self.slots.tokens.item(slot) == tokens and self.slots.generations.item(slot) == generation)

    def commit(self, sequence: Sequence) -> None:
        """The slot that it writes has its states after its computed tokens; it reads them from now on."""
        self.slots.tokens[sequence.target] = sequence.computed
        if sequence.source != sequence.target:
            self.slots.drop(sequence.source, sequence.name, sequence.source_generation)
            sequence.source, sequence.source_generation = sequence.target, sequence.target_generation

    def commit_all(self, now: Numbers, computed: Int32) -> list[int]:
        """`commit` for rows [N] with so many computed tokens [N]; returns which ones have another slot to give back."""
        self.slots.tokens[now.target.astype(np.intp)] = computed
        moved: list[int] = (now.source != now.target).nonzero()[0].tolist()
        return moved

    def release(self, sequence: Sequence, key: bytes | None) -> None:
        """Take the slots back. With the key of its computed tokens its states may stay as a snapshot."""
        if key is not None and sequence.source == sequence.target:
            self.slots.register(sequence.source, key)
        self.slots.drop(sequence.source, sequence.name, sequence.source_generation)
        if sequence.target != sequence.source:
            self.slots.drop(sequence.target, sequence.name, sequence.target_generation)

    def faults(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong with the accounts, one line a fault."""
        return self.slots.faults({(slot, s.name) for s in running for slot in (s.source, s.target)})
