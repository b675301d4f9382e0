"""Which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hybridtrt.runtime.cache_manager import CacheManager, Freed
from hybridtrt.runtime.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """Size of a step. `max_chunk` bounds the prefill tokens that one sequence gets in one step."""

    max_batch_size: int
    max_num_tokens: int
    max_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "max_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")


@dataclass(slots=True)
class Plan:
    """One step: `counts[i]` tokens of `sequences[i]`.

    The first `decodes` sequences decode. `admitted` took their slots for this step.
    """

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    decodes: int = 0
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        """Run `count` more tokens of a sequence."""
        self.sequences.append(sequence)
        self.counts.append(count)

    def without(self, left_out: Collection[Sequence]) -> Plan:
        """The plan with some sequences left out."""
        kept = [i for i, sequence in enumerate(self.sequences) if sequence not in left_out]
        return Plan(
            sequences=[self.sequences[i] for i in kept],
            counts=[self.counts[i] for i in kept],
            decodes=sum(i < self.decodes for i in kept),
            admitted=[sequence for sequence in self.admitted if sequence not in left_out],
        )


class Scheduler:
    """First come, first served, without eviction (`guaranteed_no_evict`).

    Decoding sequences come first, one token each; prefill chunks, oldest request first, fill what is left of the token
    budget. Whoever runs gets at least one token a step, so no more are admitted than the budget has tokens. The oldest
    waiting request is admitted as soon as it fits for its whole life and none overtakes it, so nobody starves, nobody
    is preempted and there is no deadlock.
    """

    def __init__(self, limits: Limits, caches: CacheManager) -> None:
        self.limits = limits
        self.caches = caches
        self.waiting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting[sequence.id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request that waits or runs."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def remove(self, sequence: Sequence) -> Freed | None:
        """Forget a sequence, finished or not, and return the pages and the slot that it held, if any."""
        if self.waiting.pop(sequence.id, None) or not self.running.pop(sequence.id, None):
            return None
        return self.caches.release(sequence)

    def schedule(self) -> Plan:
        """Choose the next step; an empty plan means that there is nothing to run."""
        plan = Plan()
        budget = self.limits.max_num_tokens
        prefilling = []
        for sequence in self.running.values():
            if sequence.decoding:
                plan.add(sequence, 1)
            else:
                prefilling.append(sequence)
        plan.decodes = len(plan.sequences)
        budget -= plan.decodes
        for sequence in prefilling:
            if budget == 0:
                return plan
            budget -= self._add_chunk(plan, sequence, budget)
        while budget and self.waiting and len(self.running) < self.limits.max_batch_size:
            sequence = next(iter(self.waiting.values()))
            if not self.caches.can_admit(sequence):
                break
            del self.waiting[sequence.id]
            self.running[sequence.id] = sequence
            self.caches.admit(sequence)
            plan.admitted.append(sequence)
            budget -= self._add_chunk(plan, sequence, budget)
        return plan

    def complete(self, plan: Plan) -> list[Sequence]:
        """Record that a step has run and return, in the order of the plan, the sequences that sample a token now."""
        sampling = []
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            self.caches.slots.advance(sequence.slot, count)
            sequence.computed += count
            if sequence.computed == sequence.total:
                sampling.append(sequence)
        return sampling

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless free and held add up to the whole pool, for every kind of page and for slots."""
        self.caches.check_integrity(self.running)

    def _add_chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        count = min(sequence.total - sequence.computed, budget, self.limits.max_chunk or budget)
        plan.add(sequence, count)
        return count
