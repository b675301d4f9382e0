"""The engine process: one engine, stepped on one thread, behind a Unix socket.

Three threads: `EngineThread` opens the engine and steps it, so that all compute has one master thread; the main thread
runs the socket (asyncio); one worker tokenises. A step's outputs cross the socket as one message a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from hybridtrt.runtime import protocol
from hybridtrt.runtime.engine_thread import EngineThread, LoadedEngine
from hybridtrt.runtime.protocol import ErrorCode, FrameDecoder, Message, ProtocolError, Reply, Submission
from hybridtrt.runtime.request import Output, Request

log = logging.getLogger("hybridtrt.engine")


@dataclass(frozen=True)
class ServerLimits:
    """What one engine process accepts and holds."""

    max_queue_size: int = 4096  # requests of all connections, running ones included
    max_outbound_bytes: int = 16 << 20  # replies that a connection has not read, before it is dropped
    drain_seconds: float = 5.0  # how long running requests may go on after SIGTERM


@dataclass(eq=False)
class Live:
    """A request that has not ended. `submitted` is false while its prompt is tokenised."""

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
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

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
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
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
        elif submission.input_ids is not None:
            self._start(live, submission.input_ids)
        elif self.loaded.tokenizer is None:
            self._fail(live, "the engine folder has no tokenizer: send token ids instead of text", "invalid_argument")
        else:
            task = asyncio.get_running_loop().run_in_executor(self._tokenizing, self._encode, submission)
            task.add_done_callback(lambda done: self._tokenized(live, done))

    def _encode(self, submission: Submission) -> tuple[int, ...]:
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None
        if submission.messages is not None:
            return tuple(tokenizer.encode_messages(submission.messages))
        assert submission.text is not None
        return tuple(tokenizer.encode(submission.text))

    def _tokenized(self, live: Live, task: asyncio.Future[tuple[int, ...]]) -> None:
        if live.engine_id not in self._live or task.cancelled():
            return
        if live.cancelled:
            self._end(live, Reply(live.engine_id, finish_reason="cancelled"))
        elif error := task.exception():
            self._fail(live, *_blame(error))
        else:
            self._start(live, task.result())

    def _start(self, live: Live, prompt_ids: tuple[int, ...]) -> None:
        try:
            self.thread.submit(Request(live.engine_id, prompt_ids, live.submission.sampling))
        except Exception as error:
            self._fail(live, *_blame(error))
        else:
            live.submitted, live.num_prompt_tokens = True, len(prompt_ids)

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
        count, live.num_prompt_tokens = live.num_prompt_tokens, None
        if reply.finish_reason is not None:
            self._forget(live)
        return replace(reply, request_id=live.submission.id, num_prompt_tokens=count)

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
