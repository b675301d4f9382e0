"""Slots and pages of the running sequences: one place that gives them out and takes them back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.pages import Holding, PagePool
from hybridtrt.runtime.prefix_cache import NEVER, Hit, PrefixCache, extend_keys
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.slots import SlotPool
from hybridtrt.runtime.swap import Swapped, SwapSpace

MAX_NAMED = 20  # faults in one message


@dataclass(frozen=True)
class CacheOptions:
    """`reserve`: admit a sequence only with all pages that it may ever need, so that none is ever preempted."""

    reserve: bool = True
    reuse: bool = True  # of prefixes
    snapshot_interval: int = 256  # tokens between regular snapshots of recurrent states
    swap_bytes: int = 0


class CacheManager:
    """Admits, grows, forks, swaps and releases sequences. It moves numbers only: the runner moves the bytes.

    A sequence holds one slot, and a second one to write until the next commit when it must not overwrite what it reads:
    a snapshot that it begins with or leaves behind, its leader's states, or its own while drafts are tried. When drafts
    were wrong nothing is committed, and the next step reads the same states again.
    """

    def __init__(self, info: RunnerInfo, options: CacheOptions, admission: Admission) -> None:
        specs = {spec.group: spec for spec in info.caches if isinstance(spec, PageSpec)}
        missing = [group for group in specs if group not in info.num_pages]
        if missing:
            raise ValueError(f"num_pages={dict(info.num_pages)} lacks page groups {missing}")
        self.page_size, self.options = info.page_size, options
        self.pools = [
            PagePool(group, info.num_pages[group], info.page_size, spec.window, spec.limit, info.max_num_tokens)
            for group, spec in specs.items()
        ]
        states = [spec for spec in info.caches if isinstance(spec, StateSpec)]
        self.slots = SlotPool(info.num_slots) if states else None
        self.prefixes = PrefixCache(self.pools, self.slots, info.page_size, options.snapshot_interval)
        self.swap = SwapSpace(options.swap_bytes)
        self.changed: list[tuple[Sequence, bool]] = []  # whose block tables changed, and whether their rows are new
        self._admission = admission
        self._state_bytes = sum(spec.bytes_per_slot for spec in states)
        self._page_bytes = [
            info.page_size * sum(s.bytes_per_token for s in info.caches if isinstance(s, PageSpec) and s.group == group)
            for group in specs
        ]
        self._rows = list(range(info.max_batch_size - 1, -1, -1))

    def check_fits(self, tokens: int) -> None:
        """Raise `ValueError` when `tokens` tokens do not fit even into empty pools."""
        for pool in self.pools:
            if (pages := pool.most_pages(tokens)) > pool.usable:
                raise ValueError(
                    f"{tokens} tokens need {pages} pages of {pool.page_size} tokens, "
                    f"but page group {pool.group!r} has {pool.usable}"
                )

    def admit(self, sequence: Sequence) -> Hit | None:
        """Let a sequence run, from a cached prefix if there is one; None when there is no room.

        It has then `hit.tokens` computed tokens. Without any its target slot must be zeroed.
        """
        if not self._rows or (self.slots is not None and not self.slots.available):
            return None
        hit = self._find(sequence)
        holdings = self._open(sequence, hit)
        if holdings is None:
            return None
        self._enter(sequence, holdings, hit.tokens)
        if self.slots is not None:
            self._take_slots(self.slots, sequence, hit)
        if self.options.reuse:
            sequence.junction = self.prefixes.junction(sequence.keys, sequence.total)
        self._plan_snapshot(sequence)
        return hit

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether one more token can run without `grow` and `stage`; false where that must be found out."""
        if sequence.total > sequence.room:
            return False
        if self.slots is None:
            return True
        record = self.slots.records[sequence.source]
        return record.tokens == sequence.computed and record.generation == sequence.source_generation

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for `tokens` tokens in all, and give back pages before the windows; false when there is none."""
        if tokens <= sequence.capacity:
            return True
        counts = []
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            pool.trim(holding, pool.first(sequence.computed))
            counts.append(max(pool.end(tokens) - len(holding.pages), 0))
            if not pool.can_take(holding, counts[-1]):
                return False
        for pool, holding, count in zip(self.pools, sequence.holdings, counts, strict=True):
            pool.take(holding, count)
        sequence.capacity = -(-tokens // self.page_size) * self.page_size
        sequence.room = min(sequence.capacity, sequence.next_snapshot)
        self.changed.append((sequence, False))
        return True

    def stage(self, sequence: Sequence) -> None:
        """Check the states that a sequence is about to read, and leave a snapshot of them behind where one is due.

        Raises `RuntimeError` when its slot does not hold its states after exactly its computed tokens.
        """
        if self.slots is None:
            return
        self.slots.check(sequence.source, sequence.name, sequence.source_generation, sequence.computed)
        if sequence.computed >= sequence.next_snapshot:
            if sequence.computed == sequence.next_snapshot and self.slots.available:
                key = sequence.keys[sequence.computed // self.page_size - 1]
                if sequence.source == sequence.target and self.slots.register(sequence.source, key):
                    self.part(sequence)
            self._plan_snapshot(sequence)

    def part(self, sequence: Sequence) -> bool:
        """Give a sequence a second slot to write, so that the one it reads stays as it is; false if there is none."""
        if self.slots is None or sequence.source != sequence.target:
            return True
        if not self.slots.available:
            return False
        sequence.target, sequence.target_generation = self.slots.take(sequence.name)
        return True

    def commit(self, sequence: Sequence, count: int) -> None:
        """A step has run `count` more tokens of a sequence."""
        sequence.computed = computed = sequence.computed + count
        if self.slots is not None:
            self.slots.records[sequence.target].tokens = computed
            if sequence.source != sequence.target:
                self.slots.drop(sequence.source, sequence.name, sequence.source_generation)
                sequence.source, sequence.source_generation = sequence.target, sequence.target_generation
        if computed - sequence.registered >= self.page_size and self.options.reuse:
            self._register(sequence)

    def fork(self, leader: Sequence, follower: Sequence) -> dict[str, list[tuple[int, int]]] | None:
        """Let a follower run on from all that its leader has computed.

        They share full pages and the states; returns the pages to copy at once, (source, target) by group, or None when
        there is no room.
        """
        slots_needed = 0 if self.slots is None else 1 + (leader.source == leader.target)
        if not self._rows or (self.slots is not None and self.slots.available < slots_needed):
            return None
        shared = [self._full_pages(pool, leader.computed) for pool in self.pools]
        pages = tuple(
            (held.start, tuple(held.pages[held.start : count]))
            for held, count in zip(leader.holdings, shared, strict=True)
        )
        holdings = self._open(follower, Hit(leader.computed, leader.source, pages))
        if holdings is None:
            return None
        copies = {}
        for pool, holding, held, count in zip(self.pools, holdings, leader.holdings, shared, strict=True):
            pool.take(holding, pool.end(leader.computed) - count)
            copies[pool.group] = list(zip(held.pages[count : len(holding.pages)], holding.pages[count:], strict=True))
        self._enter(follower, holdings, leader.computed)
        follower.keys, follower.registered = list(leader.keys), leader.registered
        if self.slots is not None:
            self.part(leader)
            follower.source = leader.source
            follower.source_generation = self.slots.hold(leader.source, follower.name)
            follower.target, follower.target_generation = self.slots.take(follower.name)
        self._plan_snapshot(follower)
        return copies

    def swap_bytes(self, sequence: Sequence) -> int:
        """Bytes that a running sequence would take outside the pools."""
        pages = zip(sequence.holdings, self._page_bytes, strict=True)
        return self._state_bytes + sum(len(holding.held) * page for holding, page in pages)

    def swap_out(self, sequence: Sequence) -> None:
        """Take everything from a running sequence and note where it was, for the runner to copy before others write."""
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            pool.trim(holding, pool.first(sequence.computed))
        sequence.swapped = Swapped(
            pages={pool.group: list(h.held) for pool, h in zip(self.pools, sequence.holdings, strict=True)},
            slots=[] if self.slots is None else [sequence.source],
            starts=[holding.start for holding in sequence.holdings],
            num_bytes=self.swap_bytes(sequence),
        )
        self.swap.add(sequence.swapped)
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> Swapped | None:
        """Give a swapped sequence as many pages as it had, and a slot, for the runner to write its copy to."""
        swapped = sequence.swapped
        assert swapped is not None
        if not self._rows or (self.slots is not None and not self.slots.available):
            return None
        pages = tuple((start, ()) for start in swapped.starts)
        holdings = self._open(sequence, Hit(pages=pages))
        if holdings is None:
            return None
        for pool, holding in zip(self.pools, holdings, strict=True):
            pool.take(holding, len(swapped.pages[pool.group]))
        tokens = sequence.computed
        self._enter(sequence, holdings, tokens)
        if self.slots is not None:
            sequence.target, sequence.target_generation = self.slots.take(sequence.name, tokens)
            sequence.source, sequence.source_generation = sequence.target, sequence.target_generation
        self.drop_swapped(sequence)
        self._plan_snapshot(sequence)
        return swapped

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give back what a sequence has outside the pools."""
        if sequence.swapped is not None:
            self.swap.remove(sequence.swapped)
            sequence.swapped = None

    def release(self, sequence: Sequence, keep: bool = False) -> None:
        """Take everything back from a running sequence. `keep`: its states are sound and may stay as a snapshot."""
        if self.slots is not None:
            if keep and sequence.source == sequence.target:
                self._keep_states(self.slots, sequence)
            self.slots.drop(sequence.source, sequence.name, sequence.source_generation)
            if sequence.target != sequence.source:
                self.slots.drop(sequence.target, sequence.name, sequence.target_generation)
            sequence.source = sequence.target = 0
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            pool.close(holding)
        sequence.holdings, sequence.capacity = [], 0
        self._rows.append(sequence.row)
        sequence.row = -1

    def take_lost(self) -> tuple[dict[str, list[int]], list[int]]:
        """Pages by group and slots whose content is gone since the last call; some may be in use again."""
        pages = {pool.group: pool.lost for pool in self.pools if pool.lost}
        for pool in self.pools:
            pool.lost = []
        slots, lost = self.slots, []
        if slots is not None:
            lost, slots.lost = slots.lost, []
        return pages, lost

    def check_integrity(self, running: Collection[Sequence], swapped: Collection[Sequence]) -> None:
        """Raise `RuntimeError`, naming the faults, unless every page, slot and row is free, cached or held by one that
        runs, and every swapped byte belongs to one that waits."""
        faults = [
            fault
            for i, pool in enumerate(self.pools)
            for fault in pool.faults([sequence.holdings[i] for sequence in running])
        ]
        if self.slots is not None:
            holders = {(slot, s.name) for s in running for slot in (s.source, s.target)}
            faults += self.slots.faults(holders)
        rows = sorted([*self._rows, *(sequence.row for sequence in running)])
        if rows != list(range(len(rows))):
            faults.append(f"the rows of block tables are damaged: {rows}")
        held = sum(sequence.swapped.num_bytes for sequence in swapped if sequence.swapped is not None)
        if self.swap.used != held:
            faults.append(f"{self.swap.used} bytes are swapped out, sequences that wait have {held}")
        if faults:
            more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
            raise RuntimeError(f"caches are damaged: {'; '.join(faults[:MAX_NAMED])}{more}")

    def _find(self, sequence: Sequence) -> Hit:
        if self.options.reuse and sequence.request.params.prompt_log_probs is None:
            extend_keys(sequence.keys, sequence.tokens(sequence.total), self.page_size, sequence.request.cache_salt)
            return self.prefixes.find(sequence.keys, sequence.total)
        return Hit(pages=tuple((0, ()) for _ in self.pools))

    def _open(self, sequence: Sequence, hit: Hit) -> list[Holding] | None:
        """Holdings that begin with the pages of a hit, or None when the pages that are to come have no room."""
        params, quotas = sequence.request.params, []
        for pool, (_, pages) in zip(self.pools, hit.pages, strict=True):
            shared = sum(map(pool.is_held, pages)) if pool.window is None else 0
            if self.options.reserve:
                needed = pool.most_pages(sequence.max_cached) - shared
                quotas.append((needed, 0))
            else:
                left = params.max_tokens - len(sequence.output_ids)
                expected = self._admission.expected_pages(pool.group, sequence.total, left) - shared
                needed = pool.most_pages(sequence.total) - shared
                quotas.append((0, max(expected, 0)))
                if pool.expected + expected > pool.usable:
                    return None
            if needed > pool.available:
                return None
        holdings = []
        for pool, (first, pages), quota in zip(self.pools, hit.pages, quotas, strict=True):
            holdings.append(pool.open(sequence.name, *quota))
            pool.skip(holdings[-1], first)
            pool.share(holdings[-1], pages)
        return holdings

    def _enter(self, sequence: Sequence, holdings: list[Holding], computed: int) -> None:
        sequence.row = self._rows.pop()
        sequence.holdings = holdings
        sequence.computed = sequence.registered = computed
        sequence.registered -= computed % self.page_size
        sequence.capacity = -(-computed // self.page_size) * self.page_size
        self.changed.append((sequence, True))

    @staticmethod
    def _take_slots(slots: SlotPool, sequence: Sequence, hit: Hit) -> None:
        """Where the hit's snapshot is the only slot that can be had, the sequence overwrites it."""
        if hit.slot:
            sequence.source_generation = slots.hold(hit.slot, sequence.name)
            sequence.source = hit.slot
            if slots.available:
                sequence.target, sequence.target_generation = slots.take(sequence.name)
            else:
                slots.forget(hit.slot)
                sequence.target, sequence.target_generation = sequence.source, sequence.source_generation
        else:
            sequence.target, sequence.target_generation = slots.take(sequence.name)
            sequence.source, sequence.source_generation = sequence.target, sequence.target_generation

    def _plan_snapshot(self, sequence: Sequence) -> None:
        if self.options.reuse:
            prompt = max(sequence.total, len(sequence.prompt))
            sequence.next_snapshot = self.prefixes.next_snapshot(sequence.computed, sequence.junction, prompt)
        else:
            sequence.next_snapshot = NEVER
        sequence.room = min(sequence.capacity, sequence.next_snapshot)

    def _register(self, sequence: Sequence) -> None:
        """Let others find the pages that have become full."""
        size = self.page_size
        if len(sequence.keys) * size + size <= sequence.computed:
            extend_keys(sequence.keys, sequence.tokens(sequence.computed), size, sequence.request.cache_salt)
        for i in range(sequence.registered // size, sequence.computed // size):
            for pool, holding in zip(self.pools, sequence.holdings, strict=True):
                if holding.start <= i < len(holding.pages):
                    pool.register(holding.pages[i], sequence.keys[i])
        sequence.registered = sequence.computed // size * size

    def _keep_states(self, slots: SlotPool, sequence: Sequence) -> None:
        count, rest = divmod(sequence.computed, self.page_size)
        if self.options.reuse and count and not rest and len(sequence.keys) >= count:
            slots.register(sequence.source, sequence.keys[count - 1])

    @staticmethod
    def _full_pages(pool: PagePool, computed: int) -> int:
        """Pages that nobody will write to any more."""
        if pool.limit is not None and computed >= pool.limit:
            return pool.end(computed)
        return computed // pool.page_size
