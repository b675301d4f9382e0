"""Hits against their definition, keys, places of snapshots, and what a wrong snapshot does."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_run import lone_answer
from null_runner import NullRunner, lone_logits, null_info

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.prefix_cache import MAX_SEEN, Hit, PrefixCache, extend_keys
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.result import Result
from hybridtrt.runtime.slots import SlotPool

SIZE = 4


def keys_of(tokens: Iterable[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, np.array(list(tokens), np.int32), SIZE, salt)
    return keys


def best_count(cache: PrefixCache, keys: list[bytes], tokens: int, snapshots: set[int]) -> int:
    """Pages of the longest prefix that leaves a token to run and of which every kind of layer has its data."""

    def is_there(pool: PagePool, count: int) -> bool:
        first = 0 if pool.window is None else count * SIZE - pool.window + 1
        end = count * SIZE if pool.limit is None else min(count * SIZE, pool.limit)
        return all(pool.find(keys[position // SIZE]) for position in range(max(first, 0), end))

    counts = [count for count in range(1, len(keys) + 1) if count * SIZE < tokens]
    counts = [count for count in counts if all(is_there(pool, count) for pool in cache.pools)]
    return max((count for count in counts if cache.slots is None or count in snapshots), default=0)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 33),
    kept=st.lists(st.sampled_from([(None, None), (None, 10), (1, None), (4, None), (7, None)]), max_size=3),
    states=st.booleans(),
    density=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_a_hit_is_the_longest_prefix_of_which_every_kind_of_layer_has_its_data(
    seed: int, tokens: int, kept: list[tuple[int | None, int | None]], states: bool, density: float
) -> None:
    rng = random.Random(seed)
    keys = keys_of(range(tokens))
    pools = [PagePool(str(i), 12, SIZE, *options) for i, options in enumerate(kept)]
    for pool in pools:
        holding = pool.open("earlier")
        pool.take(holding, len(keys))
        for page, key in zip(holding.pages, keys, strict=True):
            if rng.random() < density:
                pool.register(page, key)
    slots, snapshots = SlotPool(12) if states else None, set()
    for count, key in enumerate(keys, 1):
        if slots is not None and rng.random() < density:
            right = rng.random() < 0.8  # otherwise the states are those of another length
            slots.register(slots.take("earlier", count * SIZE + (not right))[0], key)
            snapshots |= {count} if right else set()
    cache = PrefixCache(pools, slots, SIZE, 256)
    hit = cache.find(keys, tokens)
    count = best_count(cache, keys, tokens, snapshots)
    if kept or states:
        assert hit.tokens == count * SIZE
    if not hit.tokens:
        assert hit == Hit(pages=((0, ()),) * len(pools))
        return
    assert slots is None or hit.slot == slots.find(keys[count - 1], hit.tokens) > 0
    for pool, (first, pages) in zip(pools, hit.pages, strict=True):
        assert first == pool.first(hit.tokens)
        assert pages == tuple(pool.find(key) for key in keys[first : pool.end(hit.tokens)])


def test_keys_name_a_page_with_all_before_it_and_the_salt() -> None:
    keys = keys_of(range(11))
    assert keys == keys_of(range(8))
    assert (
        len({*keys, *keys_of([9, *range(1, 8)]), *keys_of(range(8), "tenant"), *keys_of([*range(4), *range(4)])}) == 7
    )
    before = blake2b(b"tenant", digest_size=16, person=b"salt").digest()
    assert keys_of(range(4), "tenant") == [
        blake2b(before + np.arange(4, dtype="<i4").tobytes(), digest_size=16).digest()
    ]


def test_keys_are_extended_by_what_is_new() -> None:
    keys = keys_of(range(9))
    extend_keys(keys, np.arange(8, 11, dtype=np.int32), SIZE, "")
    extend_keys(keys, np.arange(8, 17, dtype=np.int32), SIZE, "")
    assert keys == keys_of(range(17))


def test_a_junction_is_what_a_prompt_shares_with_an_earlier_one() -> None:
    cache = PrefixCache([], SlotPool(2), SIZE, 256)
    prompt = list(range(20))
    assert cache.junction(keys_of(prompt), 20) == 0
    assert cache.junction(keys_of(prompt), 20) == 16, "the last token runs"
    assert cache.junction(keys_of(prompt[:9]), 9) == 8
    assert cache.junction(keys_of([*prompt[:10], 0, 0, 0]), 13) == 8
    assert cache.junction(keys_of(prompt, "tenant"), 20) == 0
    assert cache.junction(keys_of(prompt[1:]), 19) == 0


def test_prompts_are_forgotten_the_oldest_first() -> None:
    cache = PrefixCache([], SlotPool(2), SIZE, 256)
    cache.junction(keys_of(range(8)), 8)
    many = [i.to_bytes(4, "big") for i in range(MAX_SEEN)]
    cache.junction(many[:-1], 1 << 62)
    assert cache.junction(keys_of(range(8)), 8) == 4
    cache.junction(many, 1 << 62)
    assert cache.junction(keys_of(range(8)), 8) == 0


@pytest.mark.parametrize(
    ("after", "junction", "prompt", "expected"),
    [
        (0, 0, 4, 16),  # shorter than a page and one token: only regular ones
        (0, 0, 9, 8),  # the last boundary inside the prompt
        (0, 0, 12, 8),
        (0, 0, 13, 12),
        (0, 8, 30, 8),  # shared with an earlier prompt
        (8, 8, 30, 16),  # regular
        (16, 8, 30, 28),
        (28, 8, 30, 32),
        (32, 8, 33, 48),
    ],
)
def test_places_of_snapshots(after: int, junction: int, prompt: int, expected: int) -> None:
    assert PrefixCache([], SlotPool(2), SIZE, 18).next_snapshot(after, junction, prompt) == expected


INFO = null_info(windows={"window": 6}, num_slots=17, max_num_tokens=64)
PROMPTS = ((*range(16), 1, 2), (*range(20, 36), 1, 2))  # the states of both are kept at 16 tokens


def ask(name: str, prompt: Iterable[int], max_tokens: int = 6, salt: str = "") -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens, return_log_probs=True), cache_salt=salt)


def is_lone(result: Result, request: Request) -> bool:
    expected = lone_answer(request, 0, INFO, lambda history: lone_logits(history, INFO))
    return (list(result.token_ids), list(result.log_probs)) == (expected.token_ids, expected.log_probs)


def hits(engine: Engine) -> int:
    return int(engine.statistics()["hit_tokens"])


def warm_engine() -> tuple[Engine, list[bytes]]:
    """An engine that has answered both prompts, and the keys of their snapshots at 16 tokens."""
    engine = Engine(NullRunner(INFO), options=EngineOptions(poison=True))
    engine.generate([ask(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
    keys = [keys_of(prompt)[3] for prompt in PROMPTS]
    assert hits(engine) == 0
    assert all(engine._caches.slots.find(key, 16) for key in keys)
    return engine, keys


def test_what_was_run_before_is_reused() -> None:
    engine, _ = warm_engine()
    requests = [ask(str(i), [*prompt, 9]) for i, prompt in enumerate(PROMPTS)]
    assert all(map(is_lone, engine.generate(requests), requests))
    assert hits(engine) == 32
    engine.check_integrity()


def test_a_snapshot_under_the_key_of_another_prefix_changes_the_answer() -> None:
    """So that the tests in which answers equal those of lone runs can fail."""
    engine, keys = warm_engine()
    slots = engine._caches.slots
    first, second = (slots.find(key, 16) for key in keys)
    slots._snapshots |= {keys[0]: second, keys[1]: first}
    slots.records[first].key, slots.records[second].key = keys[1], keys[0]
    engine.check_integrity()
    requests = [ask(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    assert not any(map(is_lone, engine.generate(requests), requests))
    assert hits(engine) == 32


def test_a_page_under_the_key_of_another_prefix_changes_the_answer() -> None:
    engine, _ = warm_engine()
    pool = engine._caches.pools[0]
    keys = [keys_of(prompt)[1] for prompt in PROMPTS]
    first, second = map(pool.find, keys)
    pool._pages |= {keys[0]: second, keys[1]: first}
    pool._keys |= {first: keys[1], second: keys[0]}
    engine.check_integrity()
    requests = [ask(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    assert not any(map(is_lone, engine.generate(requests), requests))


def test_a_snapshot_of_another_length_is_not_used() -> None:
    engine, keys = warm_engine()
    slots = engine._caches.slots
    slots.tokens[slots.find(keys[0], 16)] = 12
    requests = [ask(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    assert all(map(is_lone, engine.generate(requests), requests))
    assert hits(engine) == 16


def test_a_hit_that_overwrites_the_only_slot_does_not_leave_its_key_behind() -> None:
    """The states of an answer stay when it ends on a page boundary, here after 16 tokens, and later after 20."""
    info = replace(INFO, num_slots=2)
    engine = Engine(NullRunner(info), options=EngineOptions(poison=True))
    first = ask("first", PROMPTS[0][:14], 3)
    (result,) = engine.generate([first])
    prompt, gains = (*first.prompt_ids, *result.token_ids[:2], 7, 7), []
    for name in ("second", "again", "third"):
        before, request = hits(engine), ask(name, prompt, 3)
        (result,) = engine.generate([request])
        assert is_lone(result, request)
        engine.check_integrity()
        gains.append(hits(engine) - before)
        if name == "again":
            prompt = (*prompt, *result.token_ids[:2], 7)
    assert gains == [16, 0, 20], "the second request ran over the states after 16 tokens"


def test_other_tenants_share_nothing() -> None:
    engine, _ = warm_engine()
    requests = [ask("other", PROMPTS[0], salt="other"), ask("same", PROMPTS[0])]
    assert all(map(is_lone, engine.generate(requests), requests))
    assert hits(engine) == 16
    assert is_lone(engine.generate(requests[:1])[0], requests[0])
    assert hits(engine) == 32


def test_a_later_prompt_finds_the_states_at_the_junction_that_two_made() -> None:
    """Nobody's last page boundary is at 8 tokens, where the texts part."""
    engine = Engine(NullRunner(INFO), options=EngineOptions(poison=True))
    gains = []
    for i in range(3):
        request = ask(str(i), [*range(8), *range(40 - 3 * i, 25, -1)])
        before = hits(engine)
        assert is_lone(engine.generate([request])[0], request)
        gains.append(hits(engine) - before)
    assert gains == [0, 0, 8]


def test_regular_snapshots_of_a_long_answer_serve_the_next_turn() -> None:
    engine = Engine(NullRunner(INFO), options=EngineOptions(snapshot_interval=8, poison=True))
    (first,) = engine.generate([ask("first", (1, 2, 3), 40)])
    turn = ask("next", (1, 2, 3, *first.token_ids[:32]))
    assert is_lone(engine.generate([turn])[0], turn)
    assert hits(engine) == 32


def test_without_reuse_nothing_is_cached() -> None:
    engine = Engine(NullRunner(INFO), options=EngineOptions(enable_block_reuse=False, poison=True))
    for _ in range(2):
        requests = [ask(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
        assert all(map(is_lone, engine.generate(requests), requests))
    statistics = engine.statistics()
    assert statistics["hit_tokens"] == statistics["hit_rate"] == 0
    assert statistics["slots"]["cached"] == sum(usage["cached"] for usage in statistics["pages"].values()) == 0
