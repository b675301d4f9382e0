"""The in-flight batching engine, in process: requests in, one step at a time, deltas out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, get_args

from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.cache_manager import CacheManager, CacheOptions
from hybridtrt.runtime.executor import Executor, Logits
from hybridtrt.runtime.intake import Intake
from hybridtrt.runtime.profile import Profile
from hybridtrt.runtime.request import FinishReason, Output, Request
from hybridtrt.runtime.result import Result, join
from hybridtrt.runtime.runner import Runner, RunnerInfo
from hybridtrt.runtime.sampler import Choice
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.statistics import Recorder, Usage, snapshot
from hybridtrt.runtime.tokenizer import Tokenizer

Policy = Literal["guaranteed_no_evict", "max_utilization"]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine batches. Limits left open are the runner's; given ones can only lower them.

    Under `guaranteed_no_evict` a request starts when pages for its prompt and all of `max_tokens` are reserved; under
    `max_utilization` when those that it is expected to need are there, and requests are preempted when they are not.
    """

    max_batch_size: int | None = None  # sequences that run at once
    max_num_tokens: int | None = None  # tokens in one step
    max_chunk: int | None = None  # prefill tokens of one sequence in one step
    policy: Policy = "guaranteed_no_evict"
    swap_bytes: int = 0  # room outside the pools for what preempted sequences have computed
    enable_block_reuse: bool = True  # of pages and states of equal prefixes
    snapshot_interval: int = 256  # tokens between regular snapshots of recurrent states
    max_draft_tokens: int = 0  # a step; 0: no speculation
    priority_seconds: float = 60.0  # waiting that a priority of 1 is worth against one of 0
    poison: bool = False  # overwrite what is freed with NaN, to prove that nothing reads it

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r} is not one of {', '.join(get_args(Policy))}")
        if self.snapshot_interval < 1:
            raise ValueError(f"snapshot_interval={self.snapshot_interval} is not positive")
        if not self.priority_seconds >= 0:
            raise ValueError(f"priority_seconds={self.priority_seconds} is negative")


class Engine:
    """Runs many requests in one batch.

    `submit`, `cancel` and `statistics` may be called from any thread; everything else belongs to one master thread, and
    only `step` changes state. Without a tokenizer the outputs carry token ids only.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = runner.info
        self.options = options = options or EngineOptions()
        self.tokenizer = tokenizer
        self._runner = runner
        caching = CacheOptions(
            options.policy == "guaranteed_no_evict",
            options.enable_block_reuse,
            options.snapshot_interval,
            options.swap_bytes,
        )
        self._caches = CacheManager(self.info, caching, Admission(self.info, profile))
        costs = self.info.costs if profile is None else profile.costs()
        self._scheduler = Scheduler(_limits(options, self.info), self._caches, costs)
        self._executor = Executor(runner, self._caches, self.info.max_batch_size, options.poison)
        self._intake = Intake(self.info, tokenizer, options.max_draft_tokens, options.priority_seconds, clock)
        self._clock = clock
        self._recorder = Recorder(clock)
        self._deadlines: list[tuple[float, int, list[Sequence]]] = []
        self._lock = threading.Lock()  # of the requests, the inbox and the closing
        self._requests: dict[str, list[Sequence]] = {}  # answers that have not finished
        self._inbox: deque[Sequence | list[Sequence]] = deque()  # new answers, and those to cancel
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises `ValueError`, one line, when it is invalid, can never fit or its id is in use; `RuntimeError` when the
        engine is closed.
        """
        self._queue(self._answers(request))

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; the next step frees what it holds. An id that is not in use is ignored."""
        with self._lock:
            if (answers := self._requests.get(request_id)) is not None:
                self._inbox.append(answers)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._inbox) or self._scheduler.has_work

    def step(self) -> list[Output]:
        """Take in what was asked, run one step and return what it added to each answer.

        A step that fails ends the answers that were in it, and no others; the engine goes on.
        """
        outputs = self._take_inbox()
        outputs += self._end_late()
        plan = self._scheduler.schedule()
        self._count(plan)
        for sequence, error in plan.failed:
            outputs += self._fail(sequence, error)
        if not (plan.sequences or plan.failed or plan.preempted) and self._scheduler.waiting:
            outputs += self._refuse_first()
        return outputs + self._run(plan)

    def generate(self, requests: Iterable[Request], on_output: Callable[[Output], None] | None = None) -> list[Result]:
        """Run requests to their ends in one batch and return their answers in the order asked.

        Raises `ValueError`, before anything runs, when one of them is invalid; of several its id is named. `on_output`
        also sees the outputs of requests that were submitted before.
        """
        requests = list(requests)
        outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        if len(outputs) != len(requests):
            raise ValueError("the requests do not have different ids")
        accepted = []
        for request in requests:
            try:
                accepted.append(self._answers(request))
            except ValueError as error:
                raise ValueError(f"{request.id}: {error}" if len(requests) > 1 else str(error)) from None
        for answers in accepted:
            self._queue(answers)
        unfinished = len(requests)
        while unfinished:
            for output in self.step():
                if output.request_id in outputs:
                    outputs[output.request_id].append(output)
                    unfinished -= output.ends_request
                if on_output is not None:
                    on_output(output)
        return [
            join([output for output in outputs[request.id] if output.index == index])
            for request in requests
            for index in range(request.params.n)
        ]

    def statistics(self) -> dict[str, Any]:
        """Counters, histograms and the state of the pools: `Statistics` as plain data."""
        slots, waiting = self._caches.slots, list(self._scheduler.waiting)
        running, unfinished = len(self._scheduler.running), sum(map(len, list(self._requests.values())))
        return snapshot(
            self._recorder,
            running=running,
            waiting=max(unfinished - running, 0),
            preempted=sum(sequence.times.scheduled is not None for sequence in waiting),
            slots=Usage(0, 0) if slots is None else Usage(slots.used, len(slots.free), slots.cached),
            pages={
                pool.group: Usage(pool.used, len(pool.free), pool.cached, pool.promised) for pool in self._caches.pools
            },
            swap_used=self._caches.swap.used,
            swap_max=self._caches.swap.capacity,
        ).to_dict()

    def check_integrity(self) -> None:
        """Raise `RuntimeError`, naming each fault, unless every page and slot is free, cached or held by who runs."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Refuse further requests and release the runner. Requests that were not finished get no more outputs."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._intake.close()
        self._runner.close()

    def _answers(self, request: Request) -> list[Sequence]:
        answers = self._intake.answers(request)
        self._caches.pages.check_fits(answers[0].max_cached)
        return answers

    def _queue(self, answers: list[Sequence]) -> None:
        request = answers[0].request
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if request.id in self._requests:
                raise ValueError(f"request id {request.id!r} is in use")
            self._requests[request.id] = answers
            self._inbox.append(answers[0])

    def _take_inbox(self) -> list[Output]:
        outputs: list[Output] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, list):
                outputs += self._end(item, "cancelled")
                continue
            self._scheduler.add(item)
            if (allotted := item.request.allotted_time_ms) is not None:
                deadline = item.times.submitted + allotted / 1e3
                heappush(self._deadlines, (deadline, item.rank[1], self._requests[item.request.id]))
        return outputs

    def _end_late(self) -> list[Output]:
        """End the requests whose time is over."""
        outputs: list[Output] = []
        now = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            outputs += self._end(heappop(self._deadlines)[2], "timed_out")
        return outputs

    def _end(self, answers: list[Sequence], reason: FinishReason) -> list[Output]:
        """End those answers of a request that have not finished."""
        sequences = list(answers)
        for sequence in sequences:
            with contextlib.suppress(Exception):  # of a tokenizer that cannot decode what is held back
                sequence.answer.finish()
        return [self._finish(sequence, reason) for sequence in sequences]

    def _count(self, plan: Plan) -> None:
        """Record what was scheduled."""
        counters = self._recorder.counters
        for sequence, hit in plan.hits:
            if sequence.times.scheduled is None:
                sequence.times.scheduled = self._clock()
                counters.lookup_tokens += sequence.total
                counters.hit_tokens += hit.tokens
        counters.preempted_recompute += plan.recomputed
        counters.preempted_swap += len(plan.swapped_out)
        counters.swapped_in += len(plan.swapped_in)

    def _run(self, plan: Plan) -> list[Output]:
        """Run a plan and add what was sampled to its answers."""
        try:
            logits = self._executor.run(plan)
            if not plan.sequences:
                return []
            choice = self._executor.sample(plan, logits)
        except Exception as error:
            failed = (*plan.sequences, *plan.swapped_out)
            return [output for sequence in failed for output in self._fail(sequence, error)]
        counters = self._recorder.counters
        counters.steps += 1
        counters.last_decode_tokens = plan.decode_tokens
        counters.last_prefill_tokens = plan.num_tokens - plan.decode_tokens
        counters.decode_tokens += counters.last_decode_tokens
        counters.prefill_tokens += counters.last_prefill_tokens
        outputs = self._decode(plan, choice)
        end = plan.singles
        for i in range(plan.singles, len(plan.sequences)):
            sequence, count, wanted = plan.sequences[i], plan.counts[i], plan.logits[i]
            start, end = end, end + wanted
            if not wanted:
                self._caches.commit(sequence, count)
                continue
            if sequence.followers:
                self._caches.commit(sequence, count)
                outputs += self._fork(sequence, logits[start:end])
                count = 0
            outputs += self._advance(sequence, count, choice, range(start, end))
        return outputs

    def _decode(self, plan: Plan, choice: Choice) -> list[Output]:
        """`_advance` for those that ran one token: most of all that happens, so it is spelled out."""
        outputs: list[Output] = []
        sampled = choice.array[: plan.singles]
        full = self._caches.commit_singles(plan.sequences, plan.rows, plan.now, sampled)
        direct = plan.now.direct.tolist()
        rows = zip(
            range(plan.singles), plan.sequences, choice.tokens, choice.valid, direct, full.tolist(), strict=False
        )
        for i, sequence, token, valid, is_direct, is_full in rows:
            try:
                if is_direct and valid and not is_full and token not in sequence.stop_ids:
                    sequence.output_ids.append(token)
                    if (output := sequence.answer.next(token)) is not None:
                        outputs.append(output)
                    continue
                reason = sequence.append(token, choice.log_probs[i], choice.top[i], valid)
            except Exception as error:
                outputs += self._fail(sequence, error)
                continue
            if reason is not None:
                outputs.append(self._finish(sequence, reason, keep=True))
            elif sequence.answer.due:
                outputs.append(sequence.answer.take())
        self._recorder.counters.sampled_tokens += plan.singles
        return outputs

    def _advance(self, sequence: Sequence, count: int, choice: Choice, rows: range) -> list[Output]:
        """Add to an answer the sampled tokens of these rows, up to the first that its drafts did not foresee."""
        drafts, sequence.drafts = sequence.drafts, []
        if not drafts and count:
            self._caches.commit(sequence, count)
        reason: FinishReason | None = None
        accepted = 0
        try:
            for row in rows:
                token = choice.tokens[row]
                reason = sequence.append(token, choice.log_probs[row], choice.top[row], choice.valid[row])
                self._recorder.counters.sampled_tokens += 1
                if reason is not None or accepted == len(drafts) or token != drafts[accepted]:
                    break
                accepted += 1
        except Exception as error:
            return self._fail(sequence, error)
        if drafts:
            self._settle(sequence, count, len(drafts), accepted, reason is not None)
        if sequence.times.first_token is None:
            sequence.times.first_token = self._clock()
        if reason is not None:
            return [self._finish(sequence, reason, keep=not drafts)]
        return [sequence.answer.take()] if sequence.answer.due else []

    def _settle(self, sequence: Sequence, count: int, drafts: int, accepted: int, finished: bool) -> None:
        """Keep what was computed of right drafts. Recurrent states cannot be cut: they are kept whole or not at all."""
        counters = self._recorder.counters
        counters.draft_tokens += drafts
        counters.accepted_draft_tokens += accepted
        if finished:
            return
        if accepted == drafts or self._caches.states is None:
            self._caches.commit(sequence, count - drafts + accepted)

    def _fork(self, leader: Sequence, logits: Logits) -> list[Output]:
        """Let the other answers of a request begin where its prompt has just ended."""
        outputs: list[Output] = []
        followers, leader.followers = leader.followers, []
        for follower in followers:
            try:
                copies = self._scheduler.fork(leader, follower)
                if copies is None:
                    continue
                follower.times.scheduled = leader.times.scheduled
                self._executor.copy_pages(copies)
                choice = self._executor.sample_first(follower, logits)
            except Exception as error:
                outputs += self._fail(follower, error)
            else:
                outputs += self._advance(follower, 0, choice, range(1))
        return outputs

    def _refuse_first(self) -> list[Output]:
        """End a request that fits by its size and yet not into idle pools, so that it would wait for ever."""
        error = RuntimeError("the request does not fit into idle pools")
        try:
            self.check_integrity()
        except RuntimeError as damage:
            error = damage
        return self._fail(self._scheduler.waiting.first(), error)

    def _fail(self, sequence: Sequence, error: Exception) -> list[Output]:
        """End an answer, and those that were to begin with the prompt that it has not run."""
        lines = str(error).strip().splitlines() or ["no message"]
        message = f"{type(error).__name__}: {lines[0]}"
        return [self._finish(failed, "error", message) for failed in (sequence, *sequence.followers)]

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None, keep: bool = False) -> Output:
        """Take back what a sequence holds, whatever ended it, and free its request's id with the last answer."""
        self._scheduler.remove(sequence, keep)
        self._recorder.finished(sequence.times, len(sequence.output_ids), reason)
        with self._lock:
            answers = self._requests[sequence.request.id]
            answers.remove(sequence)
            if not answers:
                del self._requests[sequence.request.id]
        return sequence.answer.take(reason, error, bool(answers))


def _limits(options: EngineOptions, info: RunnerInfo) -> Limits:
    limits = {}
    for name in ("max_batch_size", "max_num_tokens"):
        asked, allowed = getattr(options, name), getattr(info, name)
        if asked is not None and asked > allowed:
            raise ValueError(f"{name}={asked} exceeds {name}={allowed} of the engine")
        limits[name] = allowed if asked is None else asked
    return Limits(
        max_chunk=options.max_chunk,
        max_draft_tokens=options.max_draft_tokens,
        max_logits_rows=info.max_logits_rows,
        **limits,
    )
