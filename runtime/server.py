"""The engine process: one engine, stepped on one thread, behind a Unix socket.

Three threads: `EngineThread` opens the engine and steps it, so that all compute has one master thread; the main thread
runs the socket (asyncio); one worker tokenises and submits what has text, be it a prompt, a word or a grammar. A step's
outputs cross the socket as one message a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hybridtrt.runtime import protocol
from hybridtrt.runtime.engine_thread import EngineThread, LoadedEngine
from hybridtrt.runtime.protocol import ErrorCode, FrameDecoder, Message, ProtocolError, Reply
from hybridtrt.runtime.request import Output
from hybridtrt.runtime.submission import Submission

log = logging.getLogger("hybridtrt.engine")


@dataclass(frozen=True)
class ServerLimits:
    """What one engine process accepts and holds."""

    max_queue_size: int = 4096  # requests of all connections, running ones included
    max_outbound_bytes: int = 16 << 20  # replies that a connection has not read, before it is dropped
    drain_seconds: float = 5.0  # how long running requests may go on after SIGTERM


@dataclass(eq=False)
class Live:
    """A request that has not ended. `submitted` is false until the worker has handed it to the engine."""

    engine_id: str
    connection: Connection
    submission: Submission
    num_prompt_tokens: int | None = None
    submitted: bool = False
    cancelled: bool = False


@dataclass(eq=False)
class Connection(asyncio.Protocol):
    """One client. Whatever it does wrong ends this connection and no other."""

    server: EngineServer
    number: int
    live: dict[str, Live] = field(default_factory=dict)  # by the client's request id

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.decoder = FrameDecoder()
        self.server.connections.add(self)
        self.send(protocol.hello(self.server.loaded.info))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.decoder.feed(data):
                self.server.handle(self, message)
        except ProtocolError as error:
            log.warning("connection %d broke the protocol: %s", self.number, error)
            self.send({"type": "error", "error": str(error)})
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.drop(self)

    def send(self, message: Message) -> None:
        self.transport.write(protocol.encode(message))
        if self.transport.get_write_buffer_size() > self.server.limits.max_outbound_bytes:
            log.warning("connection %d does not read its replies; dropped", self.number)
            self.transport.abort()


class EngineServer:
    """Routes messages between connections and the engine. All methods run on the event loop's thread."""

    def __init__(self, thread: EngineThread, limits: ServerLimits) -> None:
        self.thread, self.limits = thread, limits
        self.connections: set[Connection] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._live: dict[str, Live] = {}  # by the engine's request id
        self._accepted = 0
        self._starting = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def loaded(self) -> LoadedEngine:
        return self.thread.loaded.result()

    def connect(self) -> Connection:
        """The protocol factory of a new connection; the engine is loaded by then."""
        self._accepted += 1
        return Connection(self, self._accepted)

    def handle(self, connection: Connection, message: Message) -> None:
        """Raises: ProtocolError: a message that is unknown or malformed."""
        match message["type"]:
            case "submit":
                self._submit(connection, protocol.parse_submit(message))
            case "cancel":
                if live := connection.live.get(protocol.text_field(message, "id")):
                    self._cancel(live)
            case "stop":
                tag = protocol.text_field(message, "tag")
                for live in [x for x in self._live.values() if tag and x.submission.tag == tag]:
                    self._cancel(live)
            case "statistics":
                statistics = dict(self.loaded.engine.statistics())
                connection.send({"type": "statistics", "id": message.get("id"), "statistics": statistics})
            case unknown:
                raise ProtocolError(f"unknown message type {unknown!r}")

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Send one step's outputs to the clients that still want them."""
        replies: defaultdict[Connection, list[Reply]] = defaultdict(list)
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue  # its client has gone
            reply = Reply(**vars(output), code="internal" if output.error else None)
            replies[live.connection].append(self._address(live, reply))
        for connection, batch in replies.items():
            connection.send({"type": "outputs", "outputs": [protocol.reply(x) for x in batch]})

    def fail_all(self, error: str, code: ErrorCode) -> None:
        """End every request with an error."""
        for live in list(self._live.values()):
            self._fail(live, error, code)

    def drop(self, connection: Connection) -> None:
        """Forget a connection that has closed and cancel its requests."""
        self.connections.discard(connection)
        for live in list(connection.live.values()):
            self._cancel(live)
            self._forget(live)

    async def drain(self) -> None:
        """Refuse new requests, and let running ones go on for `drain_seconds` at most."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.limits.drain_seconds)

    async def close(self, timeout: float) -> None:
        """Hang up on everyone, once what was written to them is sent or `timeout` seconds are over."""
        self._starting.shutdown(wait=False, cancel_futures=True)
        for connection in self.connections:
            connection.transport.close()
        deadline = time.monotonic() + timeout
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _submit(self, connection: Connection, submission: Submission) -> None:
        if submission.id in connection.live:
            raise ProtocolError(f"request id {submission.id!r} is in use on this connection")
        live = Live(f"{connection.number}:{submission.id}", connection, submission)
        connection.live[submission.id] = self._live[live.engine_id] = live
        self._idle.clear()
        if self._draining:
            self._fail(live, "the server is shutting down", "unavailable")
        elif len(self._live) > self.limits.max_queue_size:
            self._fail(live, f"{self.limits.max_queue_size} requests are in the server already", "unavailable")
        else:
            starting = asyncio.get_running_loop().run_in_executor(self._starting, self._start, live)
            starting.add_done_callback(lambda done: self._started(live, done))

    def _start(self, live: Live) -> bool:
        """On the worker: make the request and submit it; false if it was cancelled before."""
        request = live.submission.request(live.engine_id, self.loaded.tokenizer)
        if live.cancelled:
            return False
        live.num_prompt_tokens = len(request.prompt_ids)
        self.thread.submit(request)
        return True

    def _started(self, live: Live, starting: asyncio.Future[bool]) -> None:
        if starting.cancelled():
            return
        error = starting.exception()
        live.submitted = error is None and starting.result()
        if live.cancelled and live.submitted:
            self.thread.cancel(live.engine_id)
        elif live.engine_id not in self._live:
            return
        elif error is not None:
            self._fail(live, *_blame(error))
        elif live.cancelled:
            self._end(live, Reply(live.engine_id, finish_reason="cancelled"))

    def _cancel(self, live: Live) -> None:
        live.cancelled = True
        if live.submitted:
            self.thread.cancel(live.engine_id)

    def _fail(self, live: Live, error: str, code: ErrorCode) -> None:
        self._end(live, Reply(live.engine_id, finish_reason="error", error=error, code=code))

    def _end(self, live: Live, reply: Reply) -> None:
        live.connection.send({"type": "outputs", "outputs": [protocol.reply(self._address(live, reply))]})

    def _address(self, live: Live, reply: Reply) -> Reply:
        """The reply under the client's id; a request's first one carries the length of its prompt."""
        reply.request_id = live.submission.id
        reply.num_prompt_tokens, live.num_prompt_tokens = live.num_prompt_tokens, None
        if reply.ends_request:
            self._forget(live)
        return reply

    def _forget(self, live: Live) -> None:
        live.connection.live.pop(live.submission.id, None)
        self._live.pop(live.engine_id, None)
        if not self._live:
            self._idle.set()


def _blame(error: BaseException) -> tuple[str, ErrorCode]:
    if isinstance(error, ValueError):
        return str(error), "invalid_argument"
    log.error("a request could not be started", exc_info=error)
    return f"{type(error).__name__}: {error}", "internal"
