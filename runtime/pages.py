"""The pages of one page group: which are free, which are promised and who holds which."""

from __future__ import annotations

from collections.abc import Collection

from hybridtrt.plugins.caches import pages_held


class PagePool:
    """Hands out pages `1..num_pages-1` of one group; page 0 takes the writes of padding and is never handed out.

    An owner first reserves all that it may ever need and then takes pages out of its reservation one by one, so taking
    never fails and owners never wait for each other. Tokens from position `limit` on are not kept.
    """

    def __init__(self, group: str, num_pages: int, page_size: int, limit: int | None = None) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_pages={num_pages} of page group {group!r}: page 0 is reserved, at least 2 are needed"
            )
        if page_size < 1:
            raise ValueError(f"page_size={page_size} of page group {group!r} is not positive")
        self.group = group
        self.num_pages = num_pages
        self.page_size = page_size
        self.limit = limit
        self.free = list(range(num_pages - 1, 0, -1))
        self._held: dict[str, list[int]] = {}
        self._promised: dict[str, int] = {}  # pages that an owner may still take
        self._promised_total = 0

    @property
    def usable(self) -> int:
        """Pages that one owner could hold at most."""
        return self.num_pages - 1

    @property
    def used(self) -> int:
        """Pages that are held now."""
        return self.usable - len(self.free)

    @property
    def promised(self) -> int:
        """Free pages that belong to the reservation of some owner."""
        return self._promised_total

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence of `tokens` tokens."""
        return pages_held(tokens, self.page_size, limit=self.limit)

    def can_reserve(self, count: int) -> bool:
        """Whether `count` pages are neither held nor promised."""
        return count <= len(self.free) - self._promised_total

    def reserve(self, owner: str, count: int) -> list[int]:
        """Promise `count` pages to a new owner and return its list of pages, empty and kept up to date by `take`."""
        if owner in self._held:
            raise RuntimeError(f"{owner!r} already holds pages of group {self.group!r}")
        if not self.can_reserve(count):
            raise RuntimeError(f"{count} pages of group {self.group!r} cannot be reserved for {owner!r}")
        self._promised[owner] = count
        self._promised_total += count
        return self._held.setdefault(owner, [])

    def take(self, owner: str, count: int) -> None:
        """Hand `count` pages of its reservation to an owner."""
        if count > self._promised.get(owner, 0):
            raise RuntimeError(
                f"{owner!r} takes {count} pages of group {self.group!r} and has {self._promised.get(owner, 0)} reserved"
            )
        self._promised[owner] -= count
        self._promised_total -= count
        held = self._held[owner]
        for _ in range(count):
            held.append(self.free.pop())

    def release(self, owner: str) -> list[int]:
        """Take back everything from an owner and return the pages that it held."""
        self._promised_total -= self._promised.pop(owner, 0)
        pages = self._held.pop(owner, [])
        self.free.extend(reversed(pages))
        return pages

    def faults(self, owners: Collection[str]) -> list[str]:
        """What is wrong with the accounts if `owners` are all that live, one line a fault; empty when all is well."""
        where = f"of group {self.group!r}"
        seen: dict[int, str] = {}
        faults = [f"pages {where} are held by {owner!r}, which is gone" for owner in self._held if owner not in owners]
        for owner, pages in [("the free list", self.free), *((repr(o), p) for o, p in self._held.items())]:
            for page in pages:
                if not 0 < page < self.num_pages:
                    faults.append(f"page {page} {where} in {owner} does not exist or is reserved")
                elif page in seen:
                    faults.append(f"page {page} {where} is in {seen[page]} and in {owner}")
                seen[page] = owner
        lost = [page for page in range(1, self.num_pages) if page not in seen]
        faults += [f"page {page} {where} is neither free nor held" for page in lost]
        if self._promised_total != sum(self._promised.values()) or self._promised_total > len(self.free):
            faults.append(f"{self._promised_total} pages {where} are promised and {len(self.free)} are free")
        return faults
