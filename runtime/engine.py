"""The in-flight batching engine, in process: requests in, one step at a time, deltas out."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.batch import BatchBuilder
from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.request import FinishReason, Output, Request
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.sampler import choose, temperature_of
from hybridtrt.runtime.scheduler import Limits, Plan, Scheduler
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.statistics import Counters, Statistics, Usage
from hybridtrt.runtime.text_stream import TextStream
from hybridtrt.runtime.tokenizer import Tokenizer
from hybridtrt.runtime.validation import check_request


@dataclass(frozen=True)
class EngineOptions:
    """How an engine batches. Limits left open are the runner's; given ones can only lower them."""

    max_batch_size: int | None = None  # sequences that run at once
    max_num_tokens: int | None = None  # tokens in one step
    max_chunk: int | None = None  # prefill tokens of one sequence in one step
    poison: bool = False  # overwrite what is freed with NaN, to prove that nothing reads it


@dataclass(frozen=True)
class Result:
    """All that one request got. `error` is set when `finish_reason` is "error"."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    error: str | None = None


class Engine:
    """Runs many requests in one batch.

    `submit` and `cancel` may be called from any thread; everything else belongs to one master thread, and only `step`
    changes state. Without a tokenizer the outputs carry token ids only.
    """

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer | None = None, options: EngineOptions | None = None
    ) -> None:
        self.options = options or EngineOptions()
        self.tokenizer = tokenizer
        self.info = runner.info
        self._runner = runner
        caches = CacheManager(self.info)
        self._scheduler = Scheduler(_limits(self.options, runner), caches)
        self._caches = caches
        self._builder = BatchBuilder(caches, self.info.max_seq_len)
        self._counters = Counters()
        self._lock = threading.Lock()
        self._inbox: deque[Sequence | str] = deque()  # new sequences and ids to cancel, in the order they came
        self._live: set[str] = set()
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
            if request.id in self._live:
                raise ValueError(f"request id {request.id!r} is in use")
            self._live.add(request.id)
            self._inbox.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; the next step frees what it holds. An id that is not in use is ignored."""
        with self._lock:
            if request_id in self._live:
                self._inbox.append(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._inbox) or self._scheduler.has_work

    def step(self) -> list[Output]:
        """Take in what was asked, run one step and return what it added to each request.

        A failing runner fails the requests of this step and no others; the engine goes on.
        """
        outputs = self._take_inbox()
        plan = self._checked(self._scheduler.schedule(), outputs)
        if plan.sequences:
            try:
                sampling, logits = self._run(plan)
                choice = choose(logits, sampling)
            except Exception as error:
                message = f"step failed: {type(error).__name__}: {_first_line(error)}"
                outputs += [self._finish(sequence, "error", error=message) for sequence in plan.sequences]
            else:
                for row in zip(sampling, choice.tokens, choice.log_probs, choice.valid, strict=True):
                    outputs.append(self._advance(*row))
        return outputs

    def generate(self, requests: Iterable[Request], on_output: Callable[[Output], None] | None = None) -> list[Result]:
        """Run requests to their ends in one batch and return their results in the order asked.

        Raises `ValueError`, before anything runs, when one of them is invalid. `on_output` also sees the outputs of
        requests that were submitted before.
        """
        requests = list(requests)
        for request in requests:
            self._sequence(request)
        outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        if len(outputs) != len(requests):
            raise ValueError("request ids are not unique")
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
        return [_result(request.id, outputs[request.id]) for request in requests]

    def statistics(self) -> dict[str, Any]:
        """Counters and the state of the pools: the fields of `Statistics` as plain data. From any thread."""
        slots = self._caches.slots
        snapshot = Statistics(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + sum(isinstance(item, Sequence) for item in list(self._inbox)),
            slots=Usage(slots.used, slots.usable - slots.used),
            pages={pool.group: Usage(pool.used, len(pool.free), pool.promised) for pool in self._caches.pools},
            **asdict(self._counters),
        )
        return asdict(snapshot)

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
            stop_ids=_stop_ids(request, self.info.eos_token_ids),
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
                outputs.append(self._finish(sequence, "cancelled"))
        return outputs

    def _checked(self, plan: Plan, outputs: list[Output]) -> Plan:
        """The plan without sequences whose slot does not hold their states; these fail."""
        kept = replace(plan, sequences=[], counts=[])
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            try:
                self._caches.check(sequence)
                kept.sequences.append(sequence)
                kept.counts.append(count)
            except RuntimeError as error:
                outputs.append(self._finish(sequence, "error", error=str(error)))
        return kept

    def _run(self, plan: Plan) -> tuple[list[Sequence], NDArray[np.float32]]:
        if plan.admitted and self._caches.has_states:
            self._runner.clear_slots([sequence.slot for sequence in plan.admitted])
        batch = self._builder.build(plan)
        logits = self._runner.step(batch)
        expected = (len(batch.logits_indices), self.info.vocab_size)
        if logits.shape != expected:
            raise RuntimeError(f"the runner returned logits of shape {logits.shape}; expected {expected}")
        decoded = sum(sequence.decoding for sequence in plan.sequences)
        self._counters.steps += 1
        self._counters.decode_tokens += decoded
        self._counters.prefill_tokens += batch.num_tokens - decoded
        return self._scheduler.complete(plan), logits

    def _advance(self, sequence: Sequence, token: int, log_prob: float, valid: bool) -> Output:
        """Add one sampled token to a sequence, and end it when that was its last."""
        if not valid:
            return self._finish(sequence, "error", error="the logits of this request are not finite")
        self._counters.sampled_tokens += 1
        sequence.append(token)
        params = sequence.request.params
        text, reason = "", _reason(sequence, token)
        if sequence.text is not None:
            stopped = False
            if reason != "stop":
                text, stopped = sequence.text.push(token)
            if reason and not stopped:
                rest, stopped = sequence.text.finish()
                text += rest
            reason = "stop" if stopped else reason
        output = Output(sequence.id, (token,), text, (log_prob,) if params.return_log_probs else ())
        return self._finish(sequence, reason, output) if reason else output

    def _finish(
        self, sequence: Sequence, reason: FinishReason, output: Output | None = None, error: str | None = None
    ) -> Output:
        freed = self._scheduler.remove(sequence)
        if freed is not None and self.options.poison:
            self._runner.poison(freed.pages, freed.slots if self._caches.has_states else [])
        self._counters.finished[reason] += 1
        with self._lock:
            self._live.discard(sequence.id)
        return replace(output or Output(sequence.id), finish_reason=reason, error=error)


def _limits(options: EngineOptions, runner: Runner) -> Limits:
    info = runner.info
    for name in ("max_batch_size", "max_num_tokens"):
        asked, allowed = getattr(options, name), getattr(info, name)
        if asked is not None and asked > allowed:
            raise ValueError(f"{name}={asked} exceeds {name}={allowed} of the engine")
    return Limits(
        max_batch_size=info.max_batch_size if options.max_batch_size is None else options.max_batch_size,
        max_num_tokens=info.max_num_tokens if options.max_num_tokens is None else options.max_num_tokens,
        max_chunk=options.max_chunk,
    )


def _stop_ids(request: Request, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    params = request.params
    ends = eos_token_ids if params.end_id is None else (params.end_id,)
    return frozenset(() if params.ignore_eos else ends) | frozenset(params.stop_token_ids)


def _reason(sequence: Sequence, token: int) -> FinishReason | None:
    if token in sequence.stop_ids:
        return "stop"
    return "length" if len(sequence.output_ids) >= sequence.request.params.max_tokens else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _result(request_id: str, outputs: Rows[Output]) -> Result:
    reason = outputs[-1].finish_reason
    assert reason is not None
    return Result(
        request_id,
        tuple(token for output in outputs for token in output.token_ids),
        "".join(output.text for output in outputs),
        tuple(value for output in outputs for value in output.log_probs),
        reason,
        outputs[-1].error,
    )
