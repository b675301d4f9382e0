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
            self._finished = reply.finish_reason is not None
            if self._queued or not (self._finished or self.ask.stream):
                return False
            self._queued = True
            return True

    def send(self) -> None:
        """Send what has come. Never raises; a failure ends the stream."""
        with self._lock:
            replies, self._come, self._queued = self._come, [], False
        if not replies or self.ended:
            return
        with self._sending:
            try:
                self._send(merge(replies))
            except Exception as error:
                log.exception("a response could not be sent")
                self._end(f"the response could not be sent: {error}", "internal")

    def poll_cancelled(self) -> bool:
        """True once, when the client has gone."""
        with self._sending:
            if self.ended or self.cancelled:
                return False
            self.cancelled = self._responder.is_cancelled()
            return self.cancelled

    def _send(self, reply: Reply) -> None:
        final = reply.finish_reason is not None
        if reply.error is not None:
            self.finish_reason = "error"
            self._end(reply.error, reply.code or "internal")
        elif final or self.interface.is_worth_sending(reply):
            self._responder.send(self.interface.render(self.ask, reply, self._progress), final)
            if final:
                self.finish_reason = str(reply.finish_reason)
                self._end()
        else:
            with self._lock:
                self._come.insert(0, reply)  # it goes with the next one

    def _end(self, error: str | None = None, code: ErrorCode = "internal") -> None:
        if self.ended:
            return
        self.ended = True
        try:
            if error is not None:
                self._responder.fail(error, code)
        finally:
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
