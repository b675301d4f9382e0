"""Pages against a naive account of them: who holds which, what is cached in which order, what was promised."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrt.runtime.pages import Holding, PagePool

SIZE = 4
CHUNK = 5


@dataclass(eq=False)
class User:
    """A sequence of one of three texts, of which the cached prefix may be reused."""

    text: str
    most: int  # tokens in the end
    holding: Holding
    computed: int
    quota: int


@dataclass
class Account:
    """What a pool must know, worked out from the holders of each page."""

    pool: PagePool
    users: list[User] = field(default_factory=list)
    holders: dict[int, list[User]] = field(default_factory=dict)
    keys: dict[bytes, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)  # in the order in which they are given up
    lost: list[int] = field(default_factory=list)

    def promised(self, user: User) -> int:
        """Of its quota, without what it pays: pages are paid by their first holder."""
        return max(user.quota - sum(holders[0] is user for holders in self.holders.values()), 0)

    def took(self, user: User, page: int) -> None:
        if page in self.holders:
            self.holders[page].append(user)
            return
        if page in self.cached:
            assert self.cached[0] == page, "not the least recently used one"
            self.cached.pop(0)
            del self.keys[next(key for key, named in self.keys.items() if named == page)]
            self.lost.append(page)
        self.holders[page] = [user]

    def shared(self, user: User, page: int) -> None:
        if page in self.cached:
            self.cached.remove(page)
        self.holders.setdefault(page, []).append(user)

    def gave(self, user: User, page: int, for_good: bool) -> None:
        holders = self.holders[page]
        if for_good and holders[0] is user and len(holders) > 1 and self.pool.window is None:
            holders[1].quota += 1  # it pays for more than it had asked for
        holders.remove(user)
        if holders:
            return
        del self.holders[page]
        if page in self.keys.values():
            self.cached.append(page)
        else:
            self.lost.append(page)

    def check(self) -> None:
        pool = self.pool
        assert pool.faults([user.holding for user in self.users]) == []
        free = set(range(1, pool.num_pages)) - set(self.holders) - set(self.cached)
        assert sorted(pool.free) == sorted(free)
        assert (pool.used, pool.cached) == (len(self.holders), len(self.cached))
        assert [page for page in range(pool.num_pages) if pool.is_held(page)] == sorted(self.holders)
        promised = {id(user): self.promised(user) for user in self.users}
        assert all(user.holding.promised == promised[id(user)] for user in self.users)
        assert pool.promised == sum(promised.values()) <= len(free) + len(self.cached)
        assert pool.available == len(free) + len(self.cached) - pool.promised
        assert pool.expected == sum(user.holding.expected for user in self.users)
        assert {key: pool.find(key) for key in ALL_KEYS if pool.find(key)} == self.keys
        assert pool.lost == self.lost
        for user in self.users:
            assert pool.can_take(user.holding, user.holding.promised), "a promise is broken"


def key(text: str, i: int) -> bytes:
    return f"{text}{i}".encode()


ALL_KEYS = [key(text, i) for text in "abc" for i in range(16)]


def begin(account: Account, rng: random.Random, reserve: bool) -> None:
    """Let a new sequence in, if its pages can be promised, on a cached prefix if there is one."""
    pool, text, most = account.pool, rng.choice("abc"), rng.randint(1, 40)
    counts = [c for c in range(most // SIZE + 1) if all(pool.find(key(text, i)) for i in needed(pool, c))]
    count = rng.choice(counts) if most > 1 else 0
    pages = [pool.find(key(text, i)) for i in needed(pool, count)]
    held = sum(page in account.holders for page in pages) if pool.window is None else 0
    quota, expected = (pool.most_pages(most) - held, 0) if reserve else (0, rng.randint(0, 5))
    if quota > pool.available:
        with pytest.raises(RuntimeError, match=f"{quota} pages of group 'g' cannot be promised to 'new'"):
            pool.open("new", quota)
        return
    user = User(text, most, pool.open(text, quota, expected), count * SIZE, quota)
    pool.skip(user.holding, pool.first(user.computed))
    pool.share(user.holding, pages)
    account.users.append(user)
    for page in pages:
        account.shared(user, page)


def needed(pool: PagePool, count: int) -> range:
    """The pages that the token after `count` pages sees."""
    return range(pool.first(count * SIZE), pool.end(count * SIZE))


def advance(account: Account, rng: random.Random, user: User, reserve: bool) -> None:
    """Run a few tokens: pages before the window are given back, new ones are taken, full ones get keys."""
    pool, holding = account.pool, user.holding
    tokens = min(user.computed + rng.randint(1, CHUNK), user.most)
    start = min(pool.first(user.computed), len(holding.pages))
    before = holding.pages[holding.start : start]
    pool.trim(holding, start)
    for page in before:
        account.gave(user, page, for_good=False)
    count = max(pool.end(tokens) - len(holding.pages), 0)
    if not pool.can_take(holding, count):
        assert not reserve, "a promise is broken"
        with pytest.raises(RuntimeError, match=rf"'{user.text}' takes {count} pages of group 'g'; 0 are promised"):
            pool.take(holding, count)
        return
    free = set(pool.free)
    pool.take(holding, count)
    taken = holding.pages[len(holding.pages) - count :]
    assert set(taken[: len(free)]) <= free, "a cached page is given up while others are free"
    for page in taken:
        account.took(user, page)
    user.computed = tokens
    for i in range(holding.start, min(tokens // SIZE, len(holding.pages))):
        page, name = holding.pages[i], key(user.text, i)
        pool.register(page, name)
        if page not in account.keys.values():
            account.keys.setdefault(name, page)
    assert 0 not in holding.held
    assert len(holding.held) <= pool.most_pages(user.most)


def close(account: Account, user: User) -> None:
    pages = user.holding.held[::-1]
    account.pool.close(user.holding)
    account.users.remove(user)
    for page in pages:
        account.gave(user, page, for_good=True)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kept=st.sampled_from([(None, None), (None, 10), (1, None), (3, None), (6, None), (17, None)]),
    reserve=st.booleans(),
    num_pages=st.integers(12, 40),
)
def test_a_pool_keeps_the_accounts_of_a_naive_one(
    seed: int, kept: tuple[int | None, int | None], reserve: bool, num_pages: int
) -> None:
    rng = random.Random(seed)
    account = Account(PagePool("g", num_pages, SIZE, *kept, chunk=CHUNK))
    for _ in range(80):
        what = rng.random()
        if what < 0.25 or not account.users:
            begin(account, rng, reserve)
        elif what < 0.9:
            advance(account, rng, rng.choice(account.users), reserve)
        else:
            close(account, rng.choice(account.users))
        account.check()
        if rng.random() < 0.2:
            account.pool.lost, account.lost = [], []
    for user in list(account.users):
        close(account, user)
    account.check()
    assert account.pool.available == account.pool.usable


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(0, 60),
    window=st.one_of(st.none(), st.integers(1, 30)),
    limit=st.one_of(st.none(), st.integers(1, 30)),
    size=st.integers(1, 8),
)
def test_the_pages_of_a_sequence_are_those_of_its_tokens(
    tokens: int, window: int | None, limit: int | None, size: int
) -> None:
    pool = PagePool("g", 99, size, window, limit)
    kept = [position for position in range(tokens) if limit is None or position < limit]
    assert pool.end(tokens) == len({position // size for position in kept})
    seen = [position for position in range(tokens + 1) if window is None or position > tokens - window]
    assert pool.first(tokens) == min(seen) // size


def test_cached_pages_go_from_the_end_of_a_prefix_and_the_oldest_first() -> None:
    pool = PagePool("g", 7, SIZE)
    old, new = pool.open("old"), pool.open("new")
    for holding in (old, new):
        pool.take(holding, 3)
        for i, page in enumerate(holding.pages):
            pool.register(page, key(holding.owner, i))
    order = [*reversed(old.pages), *reversed(new.pages)]
    pool.close(old)
    pool.close(new)
    taker = pool.open("taker")
    pool.take(taker, 6)
    assert taker.pages == pool.lost == order


def test_content_has_one_name() -> None:
    pool = PagePool("g", 5, SIZE)
    holding = pool.open("a")
    pool.take(holding, 2)
    first, second = holding.pages
    pool.register(first, b"x")
    pool.register(second, b"x")
    pool.register(first, b"y")
    assert (pool.find(b"x"), pool.find(b"y")) == (first, 0)
    pool.close(holding)
    assert pool.cached == 1
    assert second in pool.free


def test_a_page_that_several_hold_is_paid_by_the_next_when_the_first_goes() -> None:
    pool = PagePool("g", 6, SIZE)
    first = pool.open("first", 3)
    pool.take(first, 2)
    second = pool.open("second", 1)
    pool.share(second, first.pages)
    assert (pool.used, pool.promised, pool.available) == (2, 2, 1)
    pool.close(first)
    assert (pool.used, pool.promised, pool.available) == (2, 1, 2)
    pool.take(second, 1)
    pool.close(second)
    assert (pool.used, pool.promised, pool.available) == (0, 0, 5)


def scene() -> tuple[PagePool, Holding]:
    """A pool with a free, a cached and a held page, and a page that is promised."""
    pool = PagePool("g", 5, SIZE)
    cached, holding = pool.open("gone"), pool.open("a", 2, expected=3)
    pool.take(cached, 1)
    pool.register(cached.pages[0], b"cached")
    pool.close(cached)
    pool.take(holding, 1)
    pool.register(holding.pages[0], b"held")
    assert pool.faults([holding]) == []
    return pool, holding


def leave(pool: PagePool, holding: Holding) -> None:
    holding.pages.clear()


def hold_twice(pool: PagePool, holding: Holding) -> None:
    holding.pages *= 2


def hold_another(pool: PagePool, holding: Holding) -> None:
    holding.pages[0] = pool.free[0]


def free_twice(pool: PagePool, holding: Holding) -> None:
    pool.free.append(pool.free[0])


def free_a_held_page(pool: PagePool, holding: Holding) -> None:
    pool.free.append(holding.pages[0])


def lose_a_free_page(pool: PagePool, holding: Holding) -> None:
    pool.free.pop()


def free_page_0(pool: PagePool, holding: Holding) -> None:
    pool.free.append(0)


def forget_a_key(pool: PagePool, holding: Holding) -> None:
    del pool._keys[pool.find(b"cached")], pool._pages[b"cached"]


def swap_keys(pool: PagePool, holding: Holding) -> None:
    pool._pages[b"cached"], pool._pages[b"held"] = pool._pages[b"held"], pool._pages[b"cached"]


def promise_more(pool: PagePool, holding: Holding) -> None:
    holding.quota += 1


def promise_too_much(pool: PagePool, holding: Holding) -> None:
    holding.quota += 4
    pool.promised += 4


def expect_more(pool: PagePool, holding: Holding) -> None:
    pool.expected += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leave, "page 2 of group 'g' of 'a' is not held by it once"),
        (hold_twice, "page 2 of group 'g' of 'a' is not held by it once"),
        (hold_another, "page 4 of group 'g' of 'a' is not held by it once"),
        (free_twice, "page 4 of group 'g' is in 2 of: the free list, the cache, a sequence"),
        (free_a_held_page, "page 2 of group 'g' is in 2 of: the free list, the cache, a sequence"),
        (lose_a_free_page, "page 3 of group 'g' is in 0 of: the free list, the cache, a sequence"),
        (free_page_0, "page 0 of group 'g' was handed out"),
        (forget_a_key, "a cached page of group 'g' has no key"),
        (swap_keys, "the keys of pages of group 'g' do not name them"),
        (promise_more, "1 pages of group 'g' are promised, which does not add up"),
        (promise_too_much, "5 pages of group 'g' are promised and 3 are there"),
        (expect_more, "4 pages of group 'g' are expected, which does not add up"),
    ],
)
def test_damage_is_named(damage: Callable[[PagePool, Holding], None], message: str) -> None:
    pool, holding = scene()
    damage(pool, holding)
    assert message in pool.faults([holding])


def test_a_holder_that_is_gone_is_named() -> None:
    pool, _ = scene()
    faults = pool.faults([])
    assert "page 2 of group 'g' is held by 'a', which is gone" in faults
    assert "1 pages of group 'g' are promised, which does not add up" in faults


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 4), "num_pages=1 of page group 'g': page 0 is reserved, at least 2 are needed"),
        ((2, 0), "page_size=0 of page group 'g' is not positive"),
    ],
)
def test_a_pool_without_room_is_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagePool("g", *sizes)
