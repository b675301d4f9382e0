"""The in-flight batching engine, in process: requests in, one step at a time, deltas out."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.batch import BatchBuilder
from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.request import Output, Request
from hybridtrt.runtime.result import Result, join
from hybridtrt.runtime.runner import Runner, RunnerInfo
from hybridtrt.runtime.sampler import choose, temperature_of
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.statistics import Recorder, Usage, snapshot
from hybridtrt.runtime.text_stream import TextStream
from hybridtrt.runtime.tokenizer import Tokenizer
from hybridtrt.runtime.validation import check_request, stop_ids


@dataclass(frozen=True)
class EngineOptions:
    """How an engine batches. Limits left open are the runner's; given ones can only lower them."""

    max_batch_size: int | None = None  # sequences that run at once
    max_num_tokens: int | None = None  # tokens in one step
    max_chunk: int | None = None  # prefill tokens of one sequence in one step
    poison: bool = False  # overwrite what is freed with NaN, to prove that nothing reads it


class Engine:
    """Runs many requests in one batch.

    `submit`, `cancel` and `statistics` may be called from any thread; everything else belongs to one master thread, and
    only `step` changes state. Without a tokenizer the outputs carry token ids only.
    """

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer | None = None, options: EngineOptions | None = None
    ) -> None:
        self.info = runner.info
        self.options = options or EngineOptions()
        self.tokenizer = tokenizer
        self._runner = runner
        self._caches = CacheManager(self.info)
        self._scheduler = Scheduler(_limits(self.options, self.info), self._caches)
        self._builder = BatchBuilder(self._caches, self.info.max_seq_len)
        self._recorder = Recorder(time.monotonic)
        self._counters = self._recorder.counters
        self._lock = threading.Lock()  # of the ids in use, the inbox and the closing
        self._ids: set[str] = set()
        self._inbox: deque[Sequence | str] = deque()  # new sequences and ids to cancel, in the order they came
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises `ValueError`, one line, when it is invalid, can never fit or its id is in use; `RuntimeError` when the
        engine is closed.
        """
        sequence = self._sequence(request)
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if request.id in self._ids:
                raise ValueError(f"request id {request.id!r} is in use")
            self._ids.add(request.id)
            self._inbox.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; the next step frees what it holds. An id that is not in use is ignored."""
        with self._lock:
            if request_id in self._ids:
                self._inbox.append(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._inbox) or self._scheduler.has_work

    def step(self) -> list[Output]:
        """Take in what was asked, run one step and return what it added to each request.

        A step that fails ends the requests that were in it, and no others; the engine goes on.
        """
        outputs = self._take_inbox()
        plan = self._scheduler.schedule()
        if not plan.sequences and self._scheduler.waiting:
            outputs.append(self._refuse_oldest())
        plan = self._prepare(plan, outputs)
        return outputs + self._run(plan) if plan.sequences else outputs

    def generate(self, requests: Iterable[Request], on_output: Callable[[Output], None] | None = None) -> list[Result]:
        """Run requests to their ends in one batch and return their results in the order asked.

        Raises `ValueError`, before anything runs, when one of them is invalid. `on_output` also sees the outputs of
        requests that were submitted before.
        """
        requests = list(requests)
        outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        if len(outputs) != len(requests):
            raise ValueError("the requests do not have different ids")
        for request in requests:
            self._sequence(request)
        for request in requests:
            self.submit(request)
        unfinished = len(requests)
        while unfinished:
            for output in self.step():
                if output.request_id in outputs:
                    outputs[output.request_id].append(output)
                    unfinished -= output.finish_reason is not None
                if on_output is not None:
                    on_output(output)
        return [join(outputs[request.id]) for request in requests]

    def statistics(self) -> dict[str, Any]:
        """Counters and the state of the pools: the fields of `Statistics` as plain data."""
        slots, pools = self._caches.slots, self._caches.pools
        running, unfinished = len(self._scheduler.running), len(self._ids)
        return snapshot(
            self._recorder,
            running=running,
            waiting=max(unfinished - running, 0),
            preempted=0,
            slots=Usage(slots.used, slots.usable - slots.used),
            pages={pool.group: Usage(pool.used, pool.usable - pool.used, promised=pool.promised) for pool in pools},
        ).to_dict()

    def check_integrity(self) -> None:
        """Raise `RuntimeError`, naming each fault, unless every page and slot is free or held by a running request."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Refuse further requests and release the runner. Requests that were not finished get no more outputs."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._runner.close()

    def _sequence(self, request: Request) -> Sequence:
        prompt = check_request(request, self.info)
        params = request.params
        words = tuple(word for word in params.stop_words if word)
        if words and self.tokenizer is None:
            raise ValueError(f"stop_words={words!r} need a tokenizer, and the engine has none")
        sequence = Sequence(
            request=request,
            prompt=prompt,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            greedy=temperature_of(params) == 0,
            stop_ids=stop_ids(params, self.info.eos_token_ids),
            text=TextStream(self.tokenizer, request.prompt_ids, words) if self.tokenizer else None,
        )
        self._caches.check_fits(sequence.max_cached)
        return sequence

    def _take_inbox(self) -> list[Output]:
        outputs = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self._scheduler.add(item)
            elif sequence := self._scheduler.find(item):
                outputs.append(self._finish(sequence, Output(item, finish_reason="cancelled")))
        return outputs

    def _prepare(self, plan: Plan, outputs: list[Output]) -> Plan:
        """Hand out pages for the plan. A sequence whose slot does not hold its states fails and is left out."""
        failed = []
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            try:
                self._caches.prepare(sequence, count)
            except RuntimeError as error:
                outputs.append(self._fail(sequence, error))
                failed.append(sequence)
        return plan.without(failed) if failed else plan

    def _run(self, plan: Plan) -> list[Output]:
        """Run a plan and add what was sampled to its sequences."""
        try:
            sampling, logits = self._forward(plan)
            choice = choose(logits, sampling)
        except Exception as error:
            return [self._fail(sequence, error) for sequence in plan.sequences]
        rows = zip(sampling, choice.tokens, choice.log_probs, choice.valid, strict=True)
        return [self._advance(*row) for row in rows]

    def _forward(self, plan: Plan) -> tuple[list[Sequence], NDArray[np.float32]]:
        """The sequences of a plan that sample a token now, and their logits `[R, vocab]`."""
        if plan.admitted and self._caches.has_states:
            self._runner.clear_slots([sequence.slot for sequence in plan.admitted])
        batch = self._builder.build(plan)
        logits = self._runner.step(batch)
        expected = (len(batch.logits_indices), self.info.vocab_size)
        if logits.shape != expected:
            raise RuntimeError(f"the runner returned logits of shape {logits.shape}; expected {expected}")
        self._counters.steps += 1
        self._counters.decode_tokens += plan.decodes
        self._counters.prefill_tokens += batch.num_tokens - plan.decodes
        return self._scheduler.complete(plan), logits

    def _advance(self, sequence: Sequence, token: int, log_prob: float, valid: bool) -> Output:
        """Add one sampled token to a sequence, and end it when that was its last."""
        try:
            if not valid:
                raise FloatingPointError("the logits of this request are not finite")
            output = sequence.append(token, log_prob)
        except Exception as error:
            return self._fail(sequence, error)
        self._counters.sampled_tokens += 1
        return self._finish(sequence, output) if output.finish_reason else output

    def _refuse_oldest(self) -> Output:
        """End a request that fits by its size and yet not into idle pools, so that it would wait for ever."""
        error = RuntimeError("the request does not fit into idle pools")
        try:
            self.check_integrity()
        except RuntimeError as damage:
            error = damage
        return self._fail(next(iter(self._scheduler.waiting.values())), error)

    def _fail(self, sequence: Sequence, error: Exception) -> Output:
        lines = str(error).strip().splitlines() or ["no message"]
        message = f"{type(error).__name__}: {lines[0]}"
        return self._finish(sequence, Output(sequence.id, finish_reason="error", error=message))

    def _finish(self, sequence: Sequence, output: Output) -> Output:
        """Take back what a sequence holds, whatever ended it, and free its id."""
        freed = self._scheduler.remove(sequence)
        if freed is not None and self.options.poison:
            self._runner.poison(freed.pages, freed.slots if self._caches.has_states else [])
        if output.finish_reason is not None:
            self._counters.finished[output.finish_reason] += 1
        with self._lock:
            self._ids.discard(sequence.id)
        return output


def _limits(options: EngineOptions, info: RunnerInfo) -> Limits:
    limits = {}
    for name in ("max_batch_size", "max_num_tokens"):
        asked, allowed = getattr(options, name), getattr(info, name)
        if asked is not None and asked > allowed:
            raise ValueError(f"{name}={asked} exceeds {name}={allowed} of the engine")
        limits[name] = allowed if asked is None else asked
    return Limits(max_chunk=options.max_chunk, **limits)
