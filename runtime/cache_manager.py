"""What running sequences hold: one place that gives it out and takes it back."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtrt.converters.memory import cache_memory
from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.page_tables import Copies, PageTables
from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.prefix_cache import NEVER, Hit, PrefixCache, extend_keys
from hybridtrt.runtime.rows import Indices, Numbers, Rows
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.slots import SlotPool
from hybridtrt.runtime.states import States
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
    """Admits, grows, forks, swaps and releases sequences: pages, states, and a row of the block tables each.

    It moves numbers only: the runner moves the bytes. `states` is None for a model without recurrent layers.
    """

    def __init__(self, info: RunnerInfo, options: CacheOptions, admission: Admission) -> None:
        state_bytes = cache_memory(info.caches).state_bytes
        self.options = options
        self.rows = Rows(info.max_batch_size)
        self.pages = PageTables(info, options.reserve, admission)
        self.states = States(info.num_slots, state_bytes) if state_bytes else None
        self.prefixes = PrefixCache(self.pools, self.slots, info.page_size, options.snapshot_interval)
        self.swap = SwapSpace(options.swap_bytes)
        self.changed: list[tuple[Sequence, bool]] = []  # whose pages changed, and whether their rows are new

    @property
    def pools(self) -> list[PagePool]:
        return self.pages.pools

    @property
    def slots(self) -> SlotPool | None:
        return None if self.states is None else self.states.slots

    def admit(self, sequence: Sequence) -> Hit | None:
        """Let a sequence run, from a cached prefix if there is one; None when there is no room.

        It has then `hit.tokens` computed tokens. Without any its target slot must be zeroed.
        """
        if not self._has_room():
            return None
        hit = self._find(sequence)
        if not self.pages.begin(sequence, hit.tokens, hit.pages):
            return None
        if self.options.reuse:
            sequence.junction = self.prefixes.junction(sequence.keys, sequence.total)
        self._enter(sequence, hit.tokens)
        if self.states is not None:
            self.states.begin(sequence, hit.slot)
        return hit

    def ready(self, now: Numbers) -> NDArray[np.bool_]:
        """Which rows [N] can run the token that was sampled last, and just that, without `grow` and `stage`."""
        if len(now.computed) == 1:  # where a step has driven numpy out of the caches its calls cost more than these
            computed = now.computed.item()
            return np.array([now.pending.item() == 1 and computed < now.room.item() and self._sound(now, computed)])
        ready = (now.pending == 1) & (now.computed < now.room)
        if self.states is not None:
            ready &= self.states.sound(now)
        return np.asarray(ready)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; false when there is none."""
        if tokens <= sequence.capacity:
            return True
        grown = self.pages.grow(sequence, tokens)
        sequence.room = min(sequence.capacity, sequence.next_snapshot)
        self.changed.append((sequence, False))  # pages may have been given back in any case
        return grown

    def stage(self, sequence: Sequence) -> None:
        """Check the states that a sequence is about to read, and leave a snapshot of them behind where one is due.

        Raises `RuntimeError` when its slot does not hold its states after exactly its computed tokens.
        """
        if self.states is None:
            return
        self.states.check(sequence)
        if sequence.computed >= sequence.next_snapshot:
            if sequence.computed == sequence.next_snapshot:
                self.states.leave_snapshot(sequence, sequence.keys[sequence.computed // self.pages.page_size - 1])
            self._plan_snapshot(sequence)

    def part(self, sequence: Sequence) -> bool:
        """Let the next step leave the states as they are, for drafts; false if there is no slot for that."""
        return self.states is None or self.states.part(sequence)

    def commit(self, sequence: Sequence, count: int) -> None:
        """A step has run `count` more tokens of a sequence."""
        sequence.computed += count
        if self.states is not None:
            self.states.commit(sequence)
        if self.options.reuse and sequence.computed - sequence.registered >= self.pages.page_size:
            self._register(sequence)

    def commit_singles(
        self, sequences: Items[Sequence], rows: Indices, now: Numbers, sampled: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """A step has run one more token of the first N sequences, in these rows [N], and sampled another one of each.

        `now`: as it was before. Returns which ones have as many as they may have.
        """
        if len(rows) == 1:  # as in `ready`
            return np.array([self._commit_single(sequences[0], now, sampled.item(0))])
        computed = now.computed + np.int32(1)
        self.rows.advance(rows, computed, sampled)
        if self.states is not None:
            for i in self.states.commit_all(now, computed):
                self.states.commit(sequences[i])
        if self.options.reuse:
            for i in (computed % self.pages.page_size == 0).nonzero()[0].tolist():
                self._register(sequences[i])
        return np.asarray(computed >= now.max_cached)

    def _commit_single(self, sequence: Sequence, now: Numbers, sampled: int) -> bool:
        computed: int = now.computed.item() + 1
        self.rows.advance_one(sequence.row, computed, sampled)
        if self.states is not None:
            self.states.commit(sequence)
        if self.options.reuse and computed % self.pages.page_size == 0:
            self._register(sequence)
        return computed >= sequence.max_cached

    def _sound(self, now: Numbers, computed: int) -> bool:
        """Of the one row there is."""
        return self.states is None or self.states.holds(now.source.item(), now.source_generation.item(), computed)

    def fork(self, leader: Sequence, follower: Sequence) -> Copies | None:
        """Let a follower run on from all that its leader has computed.

        Returns the pages that must be copied at once, or None when there is no room.
        """
        if not self._has_room(1 + (leader.source == leader.target)):
            return None
        copies = self.pages.fork(leader, follower)
        if copies is None:
            return None
        follower.keys = list(leader.keys)
        self._enter(follower, leader.computed)
        if self.states is not None:
            self.states.share(leader, follower)
        return copies

    def num_bytes(self, sequence: Sequence) -> int:
        """Bytes that a running sequence would take outside the pools."""
        return self.pages.num_bytes(sequence) + (0 if self.states is None else self.states.num_bytes)

    def swap_out(self, sequence: Sequence) -> None:
        """Take everything from a running sequence and note where it was, for the runner to copy before others write."""
        self.pages.trim(sequence)
        sequence.swapped = Swapped(
            tokens=sequence.computed,
            pages=self.pages.computed(sequence),
            slots=[] if self.states is None else [sequence.source],
            starts=[holding.start for holding in sequence.holdings],
            num_bytes=self.num_bytes(sequence),
        )
        self.swap.add(sequence.swapped)
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> Swapped | None:
        """Give a swapped sequence as many pages as it had, and a slot, for the runner to write its copy to."""
        swapped = sequence.swapped
        assert swapped is not None
        pages = [(start, ()) for start in swapped.starts]
        if not self._has_room() or not self.pages.begin(sequence, swapped.tokens, pages):
            return None
        for pool, holding in zip(self.pools, sequence.holdings, strict=True):
            pool.take(holding, len(swapped.pages[pool.group]))
        self._enter(sequence, swapped.tokens)
        if self.states is not None:
            self.states.begin(sequence, tokens=swapped.tokens)
        self.drop_swapped(sequence)
        return swapped

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give back what a sequence has outside the pools."""
        if sequence.swapped is not None:
            self.swap.remove(sequence.swapped)
            sequence.swapped = None

    def release(self, sequence: Sequence, keep: bool = False) -> None:
        """Take everything back from a running sequence. `keep`: its states are sound and may stay as a snapshot."""
        if self.states is not None:
            count, rest = divmod(sequence.computed, self.pages.page_size)
            known = keep and self.options.reuse and not rest and 0 < count <= len(sequence.keys)
            self.states.release(sequence, sequence.keys[count - 1] if known else None)
        self.pages.release(sequence)
        self.rows.leave(sequence)

    def take_lost(self) -> tuple[dict[str, list[int]], list[int]]:
        """Pages by group and slots whose content is gone since the last call; some may be in use again."""
        pages = {pool.group: pool.take_lost() for pool in self.pools}
        return {group: lost for group, lost in pages.items() if lost}, self.slots.take_lost() if self.slots else []

    def check_integrity(self, running: Items[Sequence], waiting: Items[Sequence]) -> None:
        """Raise `RuntimeError`, naming the faults, unless every page, slot and row is free, cached or held by one that
        runs, and every swapped byte belongs to one that waits."""
        faults = self.pages.faults(running)
        if self.states is not None:
            faults += self.states.faults(running)
        faults += self.rows.faults(running)
        held = sum(sequence.swapped.num_bytes for sequence in waiting if sequence.swapped is not None)
        if self.swap.used != held:
            faults.append(f"{self.swap.used} bytes are swapped out, sequences that wait have {held}")
        if faults:
            more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
            raise RuntimeError(f"caches are damaged: {'; '.join(faults[:MAX_NAMED])}{more}")

    def _has_room(self, slots: int = 1) -> bool:
        return bool(self.rows.free) and (self.states is None or self.states.has_room(slots))

    def _find(self, sequence: Sequence) -> Hit:
        if not self.options.reuse or sequence.scores_prompt:
            return self.prefixes.nothing
        self._extend_keys(sequence, sequence.total)
        return self.prefixes.find(sequence.keys, sequence.total)

    def _extend_keys(self, sequence: Sequence, tokens: int) -> None:
        page_size, known = self.pages.page_size, len(sequence.keys)
        if known < tokens // page_size:
            rest = sequence.tokens(known * page_size, tokens)
            extend_keys(sequence.keys, rest, page_size, sequence.request.cache_salt)

    def _register(self, sequence: Sequence) -> None:
        """Let others find the pages that have become full."""
        self._extend_keys(sequence, sequence.computed)
        self.pages.register(sequence)

    def _enter(self, sequence: Sequence, computed: int) -> None:
        self.rows.enter(sequence, computed)
        self.changed.append((sequence, True))
        self._plan_snapshot(sequence)

    def _plan_snapshot(self, sequence: Sequence) -> None:
        sequence.next_snapshot = NEVER
        if self.options.reuse and self.states is not None:
            prompt = max(sequence.total, len(sequence.prompt))
            sequence.next_snapshot = self.prefixes.next_snapshot(sequence.computed, sequence.junction, prompt)
        sequence.room = min(sequence.capacity, sequence.next_snapshot)
