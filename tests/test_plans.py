"""Every plan of random runs keeps what was promised and is a legal step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import null_info
from schedulers import RECOMPUTING, SWAPPING, Drafter, Driver, make_scheduler, make_sequence

from hybridtrt.plugins.caches import pages_held
from hybridtrt.runtime.cache_manager import CacheOptions
from hybridtrt.runtime.sequence import Sequence

LAYOUTS: list[dict[str, Any]] = [
    {"groups": ("full",)},
    {"groups": ("full", "window"), "windows": {"window": 6}},
    {"groups": ("window", "head"), "windows": {"window": 3}, "limits": {"head": 10}},
    {"groups": ("full", "window"), "windows": {"window": 9}, "states": False},
    {"groups": ()},
]


def make_driver(rng: random.Random) -> Driver:
    """Of all policies, over pools that have room for little more than one sequence of 48 tokens."""
    layout = dict(rng.choice(LAYOUTS))
    tokens, spare = rng.choice([1, 3, 8, 20, 20]), rng.randint(0, 6)
    windows: Mapping[str, int] = layout.get("windows", {})
    limits: Mapping[str, int] = layout.get("limits", {})
    num_pages = {
        group: 1 + spare + pages_held(48, 4, windows.get(group), limits.get(group), tokens)
        for group in layout.pop("groups")
    }
    info = null_info(60, 6, tokens, 48, 4, num_pages, rng.choice([2, 5, 14, 14, 14]), **layout)
    options = CacheOptions(
        reserve=rng.random() < 0.2,
        reuse=rng.random() < 0.7,
        snapshot_interval=rng.choice([4, 12]),
        swap_bytes=rng.choice([0, 100, 10_000, 10_000, 10_000]),
    )
    chunk, drafts = rng.choice([None, None, 1, 7]), rng.choice([0, 1, 6])
    batch, costs = rng.choice([1, 4, 6, 6]), rng.choice([SWAPPING, SWAPPING, RECOMPUTING])
    return Driver(make_scheduler(batch, tokens, chunk, drafts=drafts, options=options, costs=costs, info=info), info)


def drive(driver: Driver, rng: random.Random) -> None:
    """Sequences of three texts come, fork, are preempted, leave and end."""
    scheduler = driver.scheduler
    live: list[Sequence] = []
    for step in range(100):
        if step < 30 and rng.random() < 0.7:
            prompt = rng.randint(1, rng.choice([6, 30]))
            most = rng.choice([48 - prompt, rng.randint(1, 48 - prompt)])
            options = (str(step), prompt, most, rng.choice([0, 0.5, 1]), rng.randrange(3))
            family = [
                make_sequence(*options, index=i, drafter=Drafter(rng.random() < 0.5))
                for i in range(rng.choice([1, 1, 3]))
            ]
            live += family
            family[0].followers = family[1:]
            scheduler.add(family[0])
        if live and rng.random() < 0.05:
            scheduler.remove(rng.choice(live))
        if scheduler.running and not scheduler.caches.options.reserve and rng.random() < 0.05:
            driver.preempt(rng.choice(list(scheduler.running.values())))
        if scheduler.has_work:
            driver.step()
    for _ in range(3_000):
        if scheduler.has_work:
            driver.step()
    scheduler.check_integrity()
    assert not scheduler.has_work, "somebody starves"
    assert all(pool.available == pool.usable for pool in scheduler.caches.pools)
    assert scheduler.caches.slots is None or scheduler.caches.slots.used == 0


def test_promises_hold_and_all_ends_whole() -> None:
    totals: Counter[str] = Counter()

    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def one(seed: int) -> None:
        rng = random.Random(seed)
        driver = make_driver(rng)
        drive(driver, rng)
        totals.update(driver.seen)

    one()
    assert all(totals[what] for what in ("hits", "swapped out", "swapped in", "recomputed")), totals


def test_a_batch_knows_the_rows_of_sequences_that_have_come_back_to_others() -> None:
    info = null_info(num_pages={"full": 65}, num_slots=9)
    driver = Driver(make_scheduler(options=CacheOptions(reserve=False), info=info), info)
    for name in "ab":
        driver.scheduler.add(make_sequence(name, text=0))
    driver.step()
    before = {name: sequence.row for name, sequence in driver.scheduler.running.items()}
    for sequence in list(driver.scheduler.running.values()):
        driver.preempt(sequence)
    driver.step()
    assert {name: sequence.row for name, sequence in driver.scheduler.running.items()} == {
        "a/0": before["b/0"],
        "b/0": before["a/0"],
    }


def test_a_batch_knows_the_slot_behind_a_snapshot_where_no_page_is_taken() -> None:
    info = null_info(num_pages={"full": 65}, num_slots=9)
    driver = Driver(make_scheduler(options=CacheOptions(snapshot_interval=8), info=info), info)
    sequence = make_sequence("a", max_tokens=20, text=0)
    driver.scheduler.add(sequence)
    driver.step()
    driver.scheduler.caches.grow(sequence, 20)
    slots = []
    while sequence.computed < 12:
        driver.step()
        slots.append(sequence.source)
    assert len(set(slots)) == 2
