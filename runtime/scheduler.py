"""Which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.page_tables import Copies
from hybridtrt.runtime.prefix_cache import Hit
from hybridtrt.runtime.rows import NO_NUMBERS, NO_ROWS, Indices, Numbers
from hybridtrt.runtime.runner import Costs
from hybridtrt.runtime.sequence import Rank, Sequence
from hybridtrt.runtime.swap import Swapped
from hybridtrt.runtime.waiting import WaitingQueue

MAX_LOGITS_ROWS = 64  # of one sequence that wants the log-probabilities of its prompt, for they take V floats each

DRAFT_ROWS = 32  # tokens in a step up to which one more costs little beside reading the weights: drafts go no further


@dataclass(frozen=True)
class Limits:
    """Size of a step. `max_chunk` bounds the prefill tokens that one sequence gets in one step.

    `max_logits_rows` bounds the tokens that want logits; it leaves room for one a sequence and for all drafts. None:
    all may.
    """

    max_batch_size: int
    max_num_tokens: int
    max_chunk: int | None = None
    max_draft_tokens: int = 0
    max_logits_rows: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("max_num_tokens", 1), ("max_chunk", 1), ("max_draft_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is less than {least}")


@dataclass(slots=True)
class Plan:
    """One step: `counts[i]` tokens of `sequences[i]`, of whose last `logits[i]` tokens the logits are wanted.

    The first `singles` sequences, which are in these `rows`, run the token that they sampled last. Before the step the
    runner saves what was `swapped_out`, restores what was `swapped_in` and zeroes the states of those that `started`
    from nothing. `failed` sequences do not run: their slots do not hold their states.
    """

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    singles: int = 0
    rows: Indices = field(default_factory=lambda: NO_ROWS)
    now: Numbers = NO_NUMBERS  # of these rows, before the step
    special: list[int] = field(default_factory=list)  # which of them are not `plain`
    started: list[Sequence] = field(default_factory=list)
    hits: list[tuple[Sequence, Hit]] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[tuple[Sequence, Swapped]] = field(default_factory=list)
    recomputed: int = 0  # sequences that lost what they had and wait
    failed: list[tuple[Sequence, RuntimeError]] = field(default_factory=list)
    guided: bool = False  # whether one of all has a guide
    decode_tokens: int = 0  # tokens of sequences that decode, those that run again after wrong drafts included

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def preempted(self) -> bool:
        """Whether anybody has to wait again."""
        return bool(self.swapped_out or self.recomputed)

    def start(self, singles: list[Sequence], rows: Indices, now: Numbers = NO_NUMBERS) -> None:
        """Begin with the sequences that run one token."""
        self.sequences, self.singles, self.rows, self.now = singles, len(singles), rows, now
        self.counts, self.logits = [1] * self.singles, [1] * self.singles

    def add(self, sequence: Sequence, count: int, logits: int) -> None:
        """Run `count` more tokens of a sequence."""
        self.sequences.append(sequence)
        self.counts.append(count)
        self.logits.append(logits)

    def leave_out_preempted(self) -> None:
        """Take out the sequences that were preempted after they had been planned."""
        kept = [i for i, sequence in enumerate(self.sequences) if sequence.running]
        self.rows = self.rows[[i for i in kept if i < self.singles]]
        self.singles = len(self.rows)
        for name in ("sequences", "counts", "logits"):
            values = getattr(self, name)
            setattr(self, name, [values[i] for i in kept])


class Scheduler:
    """Continuous batching with a token budget.

    Decoding sequences come first, one token each and drafts if nothing else wants the budget; prefill chunks fill what
    is left. Of those that wait the one of lowest rank is admitted as soon as it fits, and none overtakes it, so nobody
    starves. When pages run out, the running sequence of highest rank is preempted, so the one of lowest rank always
    gets on and there is no deadlock: either what it has is swapped out, or it is computed again, whichever is cheaper.
    """

    def __init__(self, limits: Limits, caches: CacheManager, costs: Costs) -> None:
        self.limits, self.caches, self.costs = limits, caches, costs
        self.waiting = WaitingQueue()
        self.running: dict[str, Sequence] = {}
        self._in_rows: tuple[list[Sequence], Indices] | None = None  # who runs, and their rows; None: it changed

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Forget a sequence, finished or not. `keep`: what it has computed is sound and may serve others."""
        if sequence.running:
            self._stop(sequence)
            self.caches.release(sequence, keep)
        elif self.waiting.remove(sequence):
            self.caches.drop_swapped(sequence)

    def schedule(self) -> Plan:
        """Choose the next step; an empty plan means that there is nothing to run."""
        plan = Plan()
        prefilling = self._plan_decode(plan)
        plan.decode_tokens = plan.num_tokens
        self._plan_prefill(plan, prefilling)
        if not plan.preempted:
            self._admit(plan)
        if plan.preempted:
            plan.leave_out_preempted()
        if plan.now is NO_NUMBERS:
            plan.now = self.caches.rows.take(plan.rows)
        plain = plan.now.plain.tolist()
        if not all(plain):
            plan.special = [i for i, is_plain in enumerate(plain) if not is_plain]
        return plan

    def preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Let a running sequence wait, with what it has swapped out or to be computed again."""
        self._stop(sequence)
        sequence.drafts = []
        num_bytes = self.caches.num_bytes(sequence)
        copying = 2 * num_bytes / self.costs.copy_bytes_per_s
        if self.caches.swap.fits(num_bytes) and copying < sequence.computed * self.costs.seconds_per_token:
            self.caches.swap_out(sequence)
            plan.swapped_out.append(sequence)
        else:
            self.caches.release(sequence, keep=True)
            plan.recomputed += 1
        self.waiting.add(sequence)

    def fork(self, leader: Sequence, follower: Sequence) -> Copies | None:
        """Let a follower run from where its leader stands; None, and it waits, when there is no room for it.

        Returns the pages that must be copied at once.
        """
        room = len(self.running) < self.limits.max_batch_size and len(self.running) < self.limits.max_num_tokens
        copies = self.caches.fork(leader, follower) if room else None
        if copies is None:
            self.waiting.add(follower)
        else:
            self._start(follower)
        return copies

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every page, slot and swapped byte is accounted for."""
        self.caches.check_integrity(list(self.running.values()), list(self.waiting))

    def _start(self, sequence: Sequence) -> None:
        self.running[sequence.name] = sequence
        self._in_rows = None

    def _stop(self, sequence: Sequence) -> None:
        del self.running[sequence.name]
        self._in_rows = None

    def _plan_decode(self, plan: Plan) -> list[Sequence]:
        """Rows of one token first; then those with drafts, or with tokens to run again because drafts were wrong.

        Most go on without a question, so only the others are looked at. Returns those that prefill.
        """
        if self._in_rows is None:
            running = list(self.running.values())
            self._in_rows = running, np.array([sequence.row for sequence in running], np.intp)
        running, rows = self._in_rows
        now = self.caches.rows.take(rows)
        ready = self.caches.ready(now)
        if np.count_nonzero(ready) == len(ready) and not (self.limits.max_draft_tokens or self.waiting):
            plan.start(running, rows, now)  # nothing else will run
            return []
        most = 1 + self.limits.max_draft_tokens
        prefilling, longer = [], []
        for i in (~ready).nonzero()[0].tolist():
            sequence = running[i]
            pending = sequence.total - sequence.computed
            if pending > most or not sequence.output_ids:
                prefilling.append(sequence)
            elif pending > 1:
                longer.append(sequence)
            else:
                ready[i] = self._is_ready(plan, sequence, 1)
        if plan.preempted:
            ready &= np.array([sequence.running for sequence in running], np.bool_)
        num_rows = len(running) - len(prefilling)
        spare = self.limits.max_num_tokens - num_rows
        if self.limits.max_draft_tokens:
            wanted = sum(sequence.total - sequence.computed for sequence in prefilling) + bool(self.waiting)
            singles = list(compress(running, ready.tolist()))
            self._draft(singles, min(spare, DRAFT_ROWS - num_rows) - wanted)
            longer += [sequence for sequence in singles if sequence.drafts]
            ready &= np.array([not sequence.drafts for sequence in running], np.bool_)
        plan.start(list(compress(running, ready.tolist())), rows[ready])
        self._plan_longer(plan, longer, spare)
        return prefilling

    def _draft(self, sequences: Iterable[Sequence], limit: int) -> None:
        """Propose up to `limit` tokens in all."""
        for sequence in sequences:
            if limit <= 0:
                return
            left = min(limit, self.limits.max_draft_tokens, sequence.max_total - sequence.total - 1)
            if sequence.drafter is not None and left > 0:
                sequence.drafts = sequence.drafter.propose(left)
                limit -= len(sequence.drafts)

    def _plan_longer(self, plan: Plan, sequences: list[Sequence], spare: int) -> None:
        """Rows with drafts, or with tokens to run again because drafts were wrong: `spare` tokens beyond one each."""
        for sequence in sequences:
            del sequence.drafts[max(spare, 0) :]
            if sequence.drafts and not self.caches.grow(sequence, sequence.total + len(sequence.drafts)):
                sequence.drafts = []
            pending = sequence.total - sequence.computed + len(sequence.drafts)
            count = min(pending, 1 + max(spare, 0))
            if not self._is_ready(plan, sequence, count):
                continue
            if sequence.drafts and not self.caches.part(sequence):
                sequence.drafts, pending, count = [], 1, 1
            plan.add(sequence, count, 1 + len(sequence.drafts) if count == pending else 0)
            spare -= count - 1

    def _plan_prefill(self, plan: Plan, sequences: Iterable[Sequence]) -> None:
        budget = self.limits.max_num_tokens - plan.num_tokens
        for sequence in sequences:
            if budget <= 0:
                return
            if sequence.running:
                budget -= self._add_chunk(plan, sequence, budget)

    def _admit(self, plan: Plan) -> None:
        budget = self.limits.max_num_tokens - plan.num_tokens
        while budget > 0 and self.waiting and len(self.running) < self.limits.max_batch_size:
            sequence = self.waiting.first()
            if sequence.swapped is not None:
                swapped = self.caches.swap_in(sequence)
                if swapped is None:
                    return
                plan.swapped_in.append((sequence, swapped))
            else:
                hit = self.caches.admit(sequence)
                if hit is None:
                    return
                plan.hits.append((sequence, hit))
                if not hit.tokens:
                    plan.started.append(sequence)
            self.waiting.remove(sequence)
            self._start(sequence)
            budget -= self._add_chunk(plan, sequence, budget)

    def _add_chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        if not self._is_sound(plan, sequence):
            return 0
        left = sequence.total - sequence.computed
        count = min(left, budget, self.limits.max_chunk or budget, sequence.next_snapshot - sequence.computed)
        logits = int(count == left)
        if sequence.scores_prompt:
            logits = count = min(count, MAX_LOGITS_ROWS, self._logits_left(plan))
        if not self._make_room(plan, sequence, count):
            return 0
        plan.add(sequence, count, logits)
        return count

    def _logits_left(self, plan: Plan) -> int:
        """Rows of logits for one more sequence: at least one, as one is kept for each that may come after it."""
        limits = self.limits
        if limits.max_logits_rows is None or limits.max_logits_rows >= limits.max_num_tokens:
            return limits.max_num_tokens
        others = limits.max_batch_size - len(plan.sequences) - 1
        return limits.max_logits_rows - sum(plan.logits) - others

    def _is_ready(self, plan: Plan, sequence: Sequence, count: int) -> bool:
        """See to it that `count` more tokens can run; false when they cannot."""
        return sequence.running and self._is_sound(plan, sequence) and self._make_room(plan, sequence, count)

    def _is_sound(self, plan: Plan, sequence: Sequence) -> bool:
        """Check the states that are to be read, of which a snapshot may stay behind."""
        try:
            self.caches.stage(sequence)
        except RuntimeError as error:
            plan.failed.append((sequence, error))
            return False
        return True

    def _make_room(self, plan: Plan, sequence: Sequence, count: int) -> bool:
        """Give pages for `count` more tokens, those of others if need be; false when the sequence is preempted."""
        while not self.caches.grow(sequence, sequence.computed + count):
            victim = max(self.running.values(), key=_rank)
            self.preempt(victim, plan)
            if victim is sequence:
                return False
        return True


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
