"""Slots against a naive account of them: who holds which, what its states have seen, which snapshot goes first."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrt.runtime.slots import SlotPool

KEYS = [bytes([i]) for i in range(6)]


@dataclass
class Account:
    """What a pool must know."""

    pool: SlotPool
    holders: dict[int, list[str]] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    keys: dict[bytes, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)  # in the order in which they are given up
    lost: list[int] = field(default_factory=list)

    def key(self, slot: int) -> bytes | None:
        return next((key for key, named in self.keys.items() if named == slot), None)

    def take(self, owner: str, tokens: int) -> None:
        free = set(range(1, self.pool.num_slots)) - set(self.holders) - set(self.cached)
        slot, generation = self.pool.take(owner, tokens)
        if free:
            assert slot in free, "a snapshot is given up while others are free"
        else:
            assert slot == self.cached.pop(0), "not the least recently used one"
            del self.keys[self.key(slot) or b""]
            self.lost.append(slot)
        assert generation == self.generations.get(slot, 0) + 1
        self.holders[slot], self.generations[slot], self.tokens[slot] = [owner], generation, tokens

    def hold(self, slot: int, owner: str) -> None:
        assert self.pool.hold(slot, owner) == self.generations[slot]
        self.holders.setdefault(slot, []).append(owner)
        if slot in self.cached:
            self.cached.remove(slot)

    def drop(self, slot: int, owner: str) -> None:
        assert not self.pool.drop(slot, owner, self.generations[slot] - 1)
        assert not self.pool.drop(slot, "nobody", self.generations[slot])
        assert self.pool.drop(slot, owner, self.generations[slot])
        self.holders[slot].remove(owner)
        if not self.holders[slot]:
            del self.holders[slot]
            (self.lost if self.key(slot) is None else self.cached).append(slot)

    def register(self, slot: int, key: bytes) -> None:
        new = key not in self.keys and self.key(slot) is None
        assert self.pool.register(slot, key) == new
        if new:
            self.keys[key] = slot

    def forget(self, slot: int) -> None:
        self.pool.forget(slot)
        self.keys = {key: named for key, named in self.keys.items() if named != slot}

    def check(self) -> None:
        pool = self.pool
        assert pool.faults({(slot, owner) for slot, owners in self.holders.items() for owner in owners}) == []
        assert (pool.used, pool.cached) == (len(self.holders), len(self.cached))
        assert len(pool.free) == pool.usable - pool.used - pool.cached
        assert pool.available == pool.usable - pool.used
        assert pool.lost == self.lost
        for key in KEYS:
            slot = self.keys.get(key, 0)
            for tokens in range(4):
                assert pool.find(key, tokens) == (slot if slot and self.tokens[slot] == tokens else 0)
        for slot, owners in self.holders.items():
            for owner in owners:
                pool.check(slot, owner, self.generations[slot], self.tokens[slot])


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), num_slots=st.integers(2, 7))
def test_a_pool_keeps_the_accounts_of_a_naive_one(seed: int, num_slots: int) -> None:
    rng = random.Random(seed)
    account = Account(SlotPool(num_slots))
    for number in range(80):
        held = list(account.holders)
        what = rng.randrange(6)
        if what == 0 and account.pool.available:
            account.take(f"owner{number}", rng.randrange(4))
        elif what == 1 and held + account.cached:
            account.hold(rng.choice(held + account.cached), f"owner{number}")
        elif what == 2 and held:
            account.register(rng.choice(held), rng.choice(KEYS))
        elif what == 3 and held:
            account.forget(rng.choice(held))
        elif what >= 4 and held:
            slot = rng.choice(held)
            account.drop(slot, rng.choice(account.holders[slot]))
        account.check()
    for slot in list(account.holders):
        for owner in list(account.holders[slot]):
            account.drop(slot, owner)
    account.check()
    assert account.pool.available == account.pool.usable == num_slots - 1


def test_snapshots_go_the_oldest_first_and_a_hit_makes_one_young() -> None:
    pool = SlotPool(4)
    for name in (b"a", b"b", b"c"):
        slot, generation = pool.take("owner", 4)
        pool.register(slot, name)
        pool.drop(slot, "owner", generation)
    slot = pool.find(b"a", 4)
    pool.drop(slot, "reader", pool.hold(slot, "reader"))
    given_up = [pool.take("owner")[0] for _ in range(2)]
    assert given_up == pool.lost
    assert pool.find(b"a", 4) == slot
    assert (pool.find(b"b", 4), pool.find(b"c", 4)) == (0, 0)


def test_records_are_checked() -> None:
    pool = SlotPool(3)
    slot, generation = pool.take("a", 5)
    pool.check(slot, "a", generation, 5)
    for owner, number, tokens in [("b", generation, 5), ("a", generation + 1, 5), ("a", generation, 4)]:
        with pytest.raises(
            RuntimeError,
            match=rf"slot {slot} of \['a'\] \(generation 1\) holds states after 5 tokens; expected '{owner}'",
        ):
            pool.check(slot, owner, number, tokens)
    assert pool.drop(slot, "a", generation)
    assert pool.take("b") == (slot, generation + 1)
    with pytest.raises(RuntimeError, match="expected 'a'"):
        pool.check(slot, "a", generation, 0)
    assert not pool.drop(slot, "a", generation), "the late release of an owner that is gone"
    pool.check(slot, "b", generation + 1, 0)


def free_twice(pool: SlotPool) -> None:
    pool.free.append(pool.free[0])


def free_a_held_slot(pool: SlotPool) -> None:
    pool.free.append(1)


def lose_a_free_slot(pool: SlotPool) -> None:
    pool.free.remove(4)


def free_slot_0(pool: SlotPool) -> None:
    pool.free.append(0)


def swap_keys(pool: SlotPool) -> None:
    keys = pool._snapshots
    keys[b"held"], keys[b"cached"] = keys[b"cached"], keys[b"held"]


def forget_a_key(pool: SlotPool) -> None:
    pool.records[2].key = None


def hold_twice(pool: SlotPool) -> None:
    pool.records[1].holders.append("a")


def lose_a_holder(pool: SlotPool) -> None:
    pool.records[1].holders.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (free_twice, "the free list of slots is damaged: [3, 4, 4]"),
        (free_a_held_slot, "slot 1 is in 2 of: the free list, the snapshots, a sequence"),
        (lose_a_free_slot, "slot 4 is in 0 of: the free list, the snapshots, a sequence"),
        (free_slot_0, "slot 0 is in 1 of: the free list, the snapshots, a sequence"),
        (swap_keys, "the snapshot in slot 1 cannot be found"),
        (forget_a_key, "the keys of snapshots do not name them"),
        (hold_twice, "slot 1 is held by 'a', which is gone or has another one"),
        (lose_a_holder, "slot 1 of 'a' is not held by it"),
    ],
)
def test_damage_is_named(damage: Callable[[SlotPool], None], message: str) -> None:
    pool = SlotPool(5)
    for owner, key in (("a", b"held"), ("gone", b"cached")):
        slot, generation = pool.take(owner, 4)
        pool.register(slot, key)
    pool.drop(slot, "gone", generation)
    assert pool.faults({(1, "a")}) == []
    damage(pool)
    assert message in pool.faults({(1, "a")})


def test_a_holder_that_is_gone_is_named() -> None:
    pool = SlotPool(3)
    pool.take("a")
    assert pool.faults(()) == ["slot 1 is held by 'a', which is gone or has another one"]


def test_a_pool_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots=1: slot 0 is reserved, at least 2 are needed"):
        SlotPool(1)
