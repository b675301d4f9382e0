"""A running server: `with Server(ServeOptions(engine_dir)) as server:`, or `run_server` for a command line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from hybridtrt.model_repo.preflight import LOOPBACK, ServeError
from hybridtrt.model_repo.processes import CHECK_SECONDS, Processes, ServeOptions, StoppedError

__all__ = ["ServeError", "ServeOptions", "Server", "run_server"]


class Server:
    """An engine process and tritonserver, looked after by a thread."""

    def __init__(self, options: ServeOptions, report: Callable[[str], None] = print) -> None:
        self.error: ServeError | None = None  # why it ended by itself
        self.ended = threading.Event()
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self.processes = Processes(options, report, self._stopping)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @property
    def http_url(self) -> str:
        return f"http://{LOOPBACK}:{self.processes.ports['http_port']}"

    @property
    def grpc_url(self) -> str:
        """Host and port, as tritonclient wants it."""
        return f"{LOOPBACK}:{self.processes.ports['grpc_port']}"

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.processes.ports['metrics_port']}/metrics"

    @property
    def engine_socket(self) -> Path:
        assert self.processes.state
        return self.processes.state.socket

    def start(self) -> None:
        """Return when requests are served, or when `stop` was called meanwhile.

        Raises:
            ServeError: the server cannot run; what was started has been ended.
        """
        self._thread.start()
        while not (self._ready.is_set() or self.ended.wait(CHECK_SECONDS / 2)):
            pass
        if self.error is not None:
            raise self.error

    def request_stop(self) -> None:
        """Begin to stop and return at once."""
        self._stopping.set()

    def stop(self) -> None:
        """Let running requests finish for a while, then end all processes and clean up."""
        self.request_stop()
        self.ended.wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self.processes.open()
            self._ready.set()
            while not self._stopping.wait(CHECK_SECONDS):
                self.processes.watch()
        except StoppedError:
            pass
        except ServeError as error:
            self.error = error
        except Exception as error:
            self.error = ServeError(f"{type(error).__name__}: {error}")
        finally:
            try:
                self.processes.close()
            finally:
                self.ended.set()


def run_server(options: ServeOptions, report: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or SIGINT; call it from the main thread.

    Raises:
        ServeError: the server cannot run, or died too often.
    """
    server = Server(options, report)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.request_stop())
    server.start()
    if not server.ended.is_set():
        report(f"HTTP     {server.http_url}/v2/models/ensemble/generate")
        report(f"gRPC     {server.grpc_url}")
        report(f"metrics  {server.metrics_url}")
        report("ready; Ctrl-C stops it")
    while not server.ended.wait(CHECK_SECONDS):
        pass
    if server.error is not None:
        raise server.error
