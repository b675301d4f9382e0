"""From the engine's replies to Triton's responses, on a few sender threads.

Sending blocks for 100-200 us, so it happens neither on the engine's reader thread nor in `execute`. Each request is
pinned to one sender, which keeps its order; replies that pile up while a sender is busy go out as one response.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from hybridtrt.model_repo.inputs import Tensors
from hybridtrt.model_repo.interface import Ask, Interface, Progress, merge
from hybridtrt.runtime.protocol import ErrorCode, Reply

log = logging.getLogger("hybridtrt.model")


class Responder(Protocol):
    """Triton's end of one request."""

    def send(self, tensors: Tensors, final: bool) -> None: ...
    def fail(self, error: str, code: ErrorCode) -> None: ...
    def is_cancelled(self) -> bool: ...


class Stream:
    """One request between the engine and Triton. `done` is called once, when it has ended."""

    def __init__(
        self, interface: Interface, ask: Ask, responder: Responder, request_id: str, done: Callable[[Stream], None]
    ) -> None:
        self.request_id = request_id
        self.interface, self.ask = interface, ask
        self.ended = False
        self.cancelled = False
        self.finish_reason = ""
        self._responder = responder
        self._done = done
        self._progress = Progress()
        self._lock = threading.Lock()  # of what has come and not been taken
        self._come: list[Reply] = []
        self._finished = False
        self._queued = False
        self._sending = threading.Lock()  # of the responder

    def add(self, reply: Reply) -> bool:
        """Keep a reply; true if a sender must now be told."""
        with self._lock:
            if self._finished:
                return False
            self._come.append(reply)
            self._finished = reply.ends_request
            if self._queued or not (self._finished or self.ask.stream):
                return False
            self._queued = True
            return True

    def send(self) -> None:
        """Send what has come. Never raises; a failure ends the stream."""
        with self._lock:
            replies, self._come, self._queued = self._come, [], False
            final = self._finished
        if not replies or self.ended:
            return
        with self._sending:
            try:
                self._send(replies, final)
            except Exception as error:
                log.exception("a response could not be sent")
                self._fail(f"the response could not be sent: {error}", "internal")

    def poll_cancelled(self) -> bool:
        """True once, when the client has gone."""
        with self._sending:
            if self.ended or self.cancelled:
                return False
            self.cancelled = self._responder.is_cancelled()
            return self.cancelled

    def _send(self, replies: list[Reply], final: bool) -> None:
        if failed := next((reply for reply in replies if reply.error is not None), None):
            self._fail(str(failed.error), failed.code or "internal")
            return
        responses = self._responses(replies)
        for i, response in enumerate(responses, 1):
            tensors = self.interface.render(self.ask, response, self._progress)
            self._responder.send(tensors, final and i == len(responses))
        if final:
            self._end(str(replies[-1].finish_reason))

    def _responses(self, replies: list[Reply]) -> list[list[Reply]]:
        """A stream's responses carry one answer each; otherwise the only one carries all of them."""
        by_answer: dict[int, list[Reply]] = {}
        for reply in replies:
            by_answer.setdefault(reply.index, []).append(reply)
        merged = [merge(by_answer[index]) for index in sorted(by_answer)]
        if not self.ask.stream:
            return [merged]
        useful: list[list[Reply]] = []
        useless: list[Reply] = []
        for reply in merged:
            if reply.finish_reason or self.interface.is_worth_sending(reply):
                useful.append([reply])
            else:
                useless.append(reply)
        with self._lock:
            self._come[:0] = useless  # they go with the next ones
        return useful

    def _fail(self, error: str, code: ErrorCode) -> None:
        try:
            self._responder.fail(error, code)
        except Exception:
            log.exception("an error could not be sent")
        self._end("error")

    def _end(self, reason: str) -> None:
        self.ended, self.finish_reason = True, reason
        self._done(self)


class Senders:
    """Threads that send what streams hold."""

    def __init__(self, count: int) -> None:
        self._queues: list[queue.SimpleQueue[Stream | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._turn = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, args=(waiting,), name=f"sender-{i}", daemon=True)
            for i, waiting in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def attach(self, stream: Stream) -> Callable[[Reply], None]:
        """Pin the stream to a sender; the result is what takes its replies, from any thread."""
        waiting = self._queues[next(self._turn) % len(self._queues)]

        def take(reply: Reply) -> None:
            if stream.add(reply):
                waiting.put(stream)

        return take

    def close(self) -> None:
        """Send what is waiting and end the threads."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(5)

    @staticmethod
    def _run(waiting: queue.SimpleQueue[Stream | None]) -> None:
        while (stream := waiting.get()) is not None:
            stream.send()
