"""A thread-safe client of the engine process that reconnects by itself."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybridtrt.runtime import protocol
from hybridtrt.runtime.protocol import EngineInfo, FrameDecoder, Message, ProtocolError, Reply
from hybridtrt.runtime.submission import Submission

log = logging.getLogger("hybridtrt.client")

OnReply = Callable[[Reply], None]


class EngineUnavailableError(RuntimeError):
    """The engine process does not run, or is loading."""


class EngineClient:
    """One connection to an engine process; any thread may call any method.

    Replies arrive on the client's reader thread, in the order of the engine's steps; callbacks must not block. When the
    engine goes away every open request ends with an error of code "unavailable", and until it is back `submit` raises.
    """

    def __init__(self, path: Path | str, retry_seconds: float = 0.1, send_timeout: float = 5.0) -> None:
        self.path = Path(path)
        self._retry_seconds = retry_seconds
        self._send_timeout = send_timeout
        self._ids = itertools.count(1)
        self._sending = threading.Lock()  # one frame at a time
        self._lock = threading.Lock()  # of the five below
        self._socket: socket.socket | None = None  # None: not connected
        self._info: EngineInfo | None = None
        self._open: dict[str, OnReply] = {}
        self._asked: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._trouble = "it is not running"  # why there is no connection
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._reader.start()

    @property
    def info(self) -> EngineInfo | None:
        """The engine behind the socket; None while there is none."""
        return self._info

    def wait_ready(self, timeout: float) -> EngineInfo:
        """Raises: EngineUnavailableError: no engine answers within `timeout` seconds."""
        self._connected.wait(timeout)
        if (info := self._info) is None:
            raise self._unavailable()
        return info

    def new_id(self) -> str:
        """A request id that this client has not used yet."""
        return str(next(self._ids))

    def submit(self, submission: Submission, on_reply: OnReply) -> None:
        """Send a request; `on_reply` gets its replies, the last of which ends the request.

        Raises:
            EngineUnavailableError: nothing was sent, and `on_reply` will not be called.
            ProtocolError: the request is too large.
        """
        frame = protocol.encode(protocol.submit(submission))
        with self._lock:
            self._open[submission.id] = on_reply
        try:
            self._send(frame)
        except EngineUnavailableError:
            with self._lock:
                ours = self._open.pop(submission.id, None) is not None
            if ours:  # otherwise the reader has told `on_reply` already
                raise

    def stream(self, submission: Submission, timeout: float | None = None) -> Iterator[Reply]:
        """Submit and iterate over the replies; leaving the iteration early cancels the request.

        Raises:
            EngineUnavailableError: there is no engine; queue.Empty: no reply for `timeout` seconds.
        """
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.submit(submission, replies.put)
        reply = Reply(submission.id)
        try:
            while not reply.ends_request:
                reply = replies.get(timeout=timeout)
                yield reply
        finally:
            if not reply.ends_request:
                self.cancel(submission.id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request of this client; one that has ended is ignored."""
        self._tell({"type": "cancel", "id": request_id})

    def stop(self, tag: str) -> None:
        """Cancel the requests that any client submitted with this tag."""
        self._tell({"type": "stop", "tag": tag})

    def statistics(self, timeout: float = 1.0) -> dict[str, Any]:
        """Raises: EngineUnavailableError: there is no engine, or it does not answer."""
        number = next(self._ids)
        answer: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            self._asked[number] = answer
        try:
            self._send(protocol.encode({"type": "statistics", "id": number}))
            statistics = answer.get(timeout=timeout)
        except queue.Empty:
            statistics = None
        finally:
            with self._lock:
                self._asked.pop(number, None)
        if statistics is None:
            raise EngineUnavailableError(f"the engine process did not answer within {timeout:g} s")
        return statistics

    def close(self) -> None:
        """Hang up; open requests end with an error."""
        self._closing.set()
        with self._lock:
            _hang_up(self._socket)
        self._reader.join(5)

    def _unavailable(self) -> EngineUnavailableError:
        return EngineUnavailableError(f"the engine is not available: {self._trouble}")

    def _tell(self, message: Message) -> None:
        try:
            self._send(protocol.encode(message))
        except EngineUnavailableError:
            log.debug("%s was not sent: the engine is not available", message["type"])

    def _send(self, frame: bytes) -> None:
        with self._sending:
            if (connection := self._socket) is None:
                raise self._unavailable()
            try:
                connection.sendall(frame)
            except OSError as error:
                self._trouble = f"it does not read ({error})"
                _hang_up(connection)  # the reader notices and cleans up
                raise self._unavailable() from None

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    self._converse(connection)
            except (OSError, ProtocolError) as error:
                self._trouble = _describe(error)
            self._disconnected()
            self._closing.wait(self._retry_seconds)

    def _converse(self, connection: socket.socket) -> None:
        seconds, rest = divmod(self._send_timeout, 1)
        timeval = struct.pack("ll", int(seconds), int(rest * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        connection.connect(str(self.path))
        decoder = FrameDecoder()
        while data := connection.recv(1 << 18):
            for message in decoder.feed(data):
                if self._info is None:
                    info = protocol.parse_hello(message)
                    with self._lock:
                        self._socket, self._info = connection, info
                    self._connected.set()
                else:
                    self._dispatch(message)
        raise ConnectionResetError("it has ended or is restarting")

    def _dispatch(self, message: Message) -> None:
        match message["type"]:
            case "outputs":
                for values in message["outputs"]:
                    self._reply(protocol.parse_reply(values))
            case "statistics":
                with self._lock:
                    answer = self._asked.get(message["id"])
                if answer is not None:
                    answer.put(message["statistics"])
            case "error":
                raise ProtocolError(f"it hung up: {message['error']}")

    def _reply(self, reply: Reply) -> None:
        with self._lock:
            ask = self._open.pop if reply.ends_request else self._open.get
            on_reply = ask(reply.request_id, None)
        if on_reply is None:
            return
        try:
            on_reply(reply)
        except Exception:
            log.exception("a reply callback failed")

    def _disconnected(self) -> None:
        with self._lock:
            self._socket = self._info = None
            self._connected.clear()
            orphans = list(self._open)
            asked, self._asked = list(self._asked.values()), {}
        for request_id in orphans:
            error = f"the engine stopped before the request ended: {self._trouble}"
            self._reply(Reply(request_id, finish_reason="error", error=error, code="unavailable"))
        for answer in asked:
            answer.put(None)


def _hang_up(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _describe(error: Exception) -> str:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "it is not running, or still loading"
    return str(error)
