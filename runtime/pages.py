"""The pages of one page group: which are free, which hold a cached prefix, and who holds which."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hybridtrt.plugins.caches import pages_held


@dataclass(slots=True, eq=False)
class Holding:
    """Pages of one sequence: `pages[i]` holds its tokens from `i * page_size` on, and is 0 once it was given back.

    Of `quota` pages that were promised to it, it has used `paid`. A page that several hold is paid by the first.
    """

    owner: str
    quota: int = 0
    expected: int = 0  # pages that it is expected to hold
    pages: list[int] = field(default_factory=list)
    start: int = 0  # first page that has not been given back
    paid: int = 0

    @property
    def promised(self) -> int:
        """Pages that it may still take and always gets."""
        return max(self.quota - self.paid, 0)

    @property
    def held(self) -> list[int]:
        return self.pages[self.start :]


class PagePool:
    """Hands out pages `1..num_pages-1` of one group; page 0 takes the writes of padding and is never handed out.

    A full page can be registered under the key of its content; once nobody holds it, it stays until its room is needed,
    least recently used first. Tokens from `limit` on are not kept, tokens before the `window` of the next one are given
    back. `lost` collects pages whose content is gone, for whoever poisons them.
    """

    def __init__(
        self,
        group: str,
        num_pages: int,
        page_size: int,
        window: int | None = None,
        limit: int | None = None,
        chunk: int = 1,
    ) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_pages={num_pages} of page group {group!r}: page 0 is reserved, at least 2 are needed"
            )
        if page_size < 1:
            raise ValueError(f"page_size={page_size} of page group {group!r} is not positive")
        self.group, self.num_pages, self.page_size = group, num_pages, page_size
        self.window, self.limit, self.chunk = window, limit, chunk
        self.free = list(range(num_pages - 1, 0, -1))
        self.promised = 0  # pages of `available` that belong to quotas
        self.expected = 0  # pages that all holders are expected to hold
        self.lost: list[int] = []
        self._holders: list[list[Holding]] = [[] for _ in range(num_pages)]
        self._pages: dict[bytes, int] = {}  # by key of content
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered and held by nobody, least recently used first

    @property
    def usable(self) -> int:
        """Pages that one owner could hold at most."""
        return self.num_pages - 1

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that could still be hit."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.usable - len(self.free) - len(self._idle)

    @property
    def available(self) -> int:
        """Pages that are not held and not promised."""
        return len(self.free) + len(self._idle) - self.promised

    def most_pages(self, tokens: int) -> int:
        """Pages that a sequence of `tokens` tokens holds at most at once."""
        return pages_held(tokens, self.page_size, self.window, self.limit, self.chunk)

    def end(self, tokens: int) -> int:
        """One past the last page of a sequence of `tokens` tokens."""
        return -(-(tokens if self.limit is None else min(tokens, self.limit)) // self.page_size)

    def full_pages(self, tokens: int) -> int:
        """Pages that a sequence of `tokens` tokens does not write to any more."""
        return self.end(tokens) if self.limit is not None and tokens >= self.limit else tokens // self.page_size

    def first(self, tokens: int) -> int:
        """The first page that a token at position `tokens` sees."""
        return 0 if self.window is None else max(tokens - self.window + 1, 0) // self.page_size

    def open(self, owner: str, quota: int = 0, expected: int = 0) -> Holding:
        """A new holding with a promise of `quota` pages."""
        if quota > self.available:
            raise RuntimeError(f"{quota} pages of group {self.group!r} cannot be promised to {owner!r}")
        self.promised += quota
        self.expected += expected
        return Holding(owner, quota, expected)

    def can_take(self, holding: Holding, count: int) -> bool:
        """Whether `take` would succeed."""
        return count <= holding.quota - holding.paid or count <= holding.promised + max(self.available, 0)

    def take(self, holding: Holding, count: int) -> None:
        """Append `count` pages, the promised ones first; cached ones lose their content when no others are free."""
        if not self.can_take(holding, count):
            raise RuntimeError(
                f"{holding.owner!r} takes {count} pages of group {self.group!r}; "
                f"{holding.promised} are promised to it and {max(self.available, 0)} are available"
            )
        for _ in range(count):
            page = self.free.pop() if self.free else self._evict()
            self._holders[page].append(holding)
            holding.pages.append(page)
        self._pay(holding, count)

    def share(self, holding: Holding, pages: Iterable[int]) -> None:
        """Append pages that are cached or held by others."""
        for page in pages:
            if not self._holders[page]:
                del self._idle[page]
                self._pay(holding, 1)
            self._holders[page].append(holding)
            holding.pages.append(page)

    def skip(self, holding: Holding, count: int) -> None:
        """Begin an empty holding with `count` pages that have been given back."""
        holding.pages.extend([0] * count)
        holding.start += count

    def trim(self, holding: Holding, start: int) -> None:
        """Give back the pages before page `start`."""
        for i in range(holding.start, min(start, len(holding.pages))):
            page, holding.pages[i] = holding.pages[i], 0
            holders = self._holders[page]
            payer = holders[0]
            holders.remove(holding)
            if payer is holding:
                self._pay(holding, -1)
                if holders:
                    self._pay(holders[0], 1)
            if not holders:
                self._let_go(page)
        holding.start = max(holding.start, min(start, len(holding.pages)))

    def close(self, holding: Holding) -> None:
        """Give back everything, the last page first: that is the order in which cached ones are given up."""
        self.promised -= holding.promised
        self.expected -= holding.expected
        holding.quota = holding.expected = 0
        for page in reversed(holding.held):
            holders = self._holders[page]
            payer = holders[0]
            holders.remove(holding)
            if not holders:
                self._let_go(page)
            elif payer is holding and self.window is None:
                holders[0].quota += 1  # what was shared at its start is not in its quota
                holders[0].paid += 1
            elif payer is holding:
                self._pay(holders[0], 1)
        holding.pages, holding.start = [], 0

    def register(self, page: int, key: bytes) -> None:
        """Name the content of a full page that somebody holds, unless another page has the same."""
        if key not in self._pages and page not in self._keys:
            self._pages[key] = page
            self._keys[page] = key

    def find(self, key: bytes) -> int:
        """The page of this content, 0 if there is none."""
        return self._pages.get(key, 0)

    def is_held(self, page: int) -> bool:
        """Whether somebody holds the page; otherwise it is free or cached."""
        return bool(self._holders[page])

    def _pay(self, holding: Holding, count: int) -> None:
        left = holding.quota - holding.paid
        holding.paid += count
        self.promised += max(left - count, 0) - max(left, 0)

    def _let_go(self, page: int) -> None:
        if page in self._keys:
            self._idle[page] = None
        else:
            self.free.append(page)
            self.lost.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        self.lost.append(page)
        return page

    def take_lost(self) -> list[int]:
        """The pages that lost their content since the last call."""
        lost, self.lost = self.lost, []
        return lost

    def faults(self, holdings: Collection[Holding]) -> list[str]:
        """What is wrong with the accounts if `holdings` are all that live, one line a fault; empty when all is well."""
        where = f"of group {self.group!r}"
        owners = {id(holding): holding.owner for holding in holdings}
        claims = Counter((page, id(holding)) for holding in holdings for page in holding.held)
        faults = []
        for page, holders in enumerate(self._holders):
            for holding in holders:
                if id(holding) not in owners:
                    faults.append(f"page {page} {where} is held by {holding.owner!r}, which is gone")
                elif claims.pop((page, id(holding)), 0) != 1:
                    faults.append(f"page {page} {where} of {holding.owner!r} is not held by it once")
        faults += [f"page {page} {where} of {owners[owner]!r} is not held by it once" for page, owner in claims]
        places = Counter([*self.free, *self._idle, *(page for page, holders in enumerate(self._holders) if holders)])
        for page in range(1, self.num_pages):
            if places[page] != 1:
                faults.append(f"page {page} {where} is in {places[page]} of: the free list, the cache, a sequence")
        if 0 in places:
            faults.append(f"page 0 {where} was handed out")
        if any(self._pages.get(key) != page for page, key in self._keys.items()) or len(self._keys) != len(self._pages):
            faults.append(f"the keys of pages {where} do not name them")
        if not all(page in self._keys for page in self._idle):
            faults.append(f"a cached page {where} has no key")
        for name in ("promised", "expected"):
            if getattr(self, name) != sum(getattr(holding, name) for holding in holdings):
                faults.append(f"{getattr(self, name)} pages {where} are {name}, which does not add up")
        if self.promised > len(self.free) + len(self._idle):
            faults.append(
                f"{self.promised} pages {where} are promised and {len(self.free) + len(self._idle)} are there"
            )
        return faults
