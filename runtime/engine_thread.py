"""The one thread that opens an engine and steps it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from hybridtrt.runtime.protocol import EngineInfo
from hybridtrt.runtime.request import Output, Request
from hybridtrt.runtime.submission import EncodesPrompts

log = logging.getLogger("hybridtrt.engine")


class StepsRequests(Protocol):
    """What is needed of an engine. Everything but `step` and `close` may be called from any thread."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> Sequence[Output]: ...
    def statistics(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that is ready, with the tokenizer of its folder (None: only token ids are accepted)."""

    engine: StepsRequests
    info: EngineInfo
    tokenizer: EncodesPrompts | None = None


class EngineThread:
    """Opens the engine, steps it while it has work and sleeps otherwise."""

    def __init__(self, open_engine: Callable[[], LoadedEngine]) -> None:
        self.loaded: Future[LoadedEngine] = Future()
        self._open = open_engine
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[Sequence[Output]], object], failed: Callable[[str], object]) -> None:
        """Start opening: `loaded` will hold the engine, or what `open_engine` raised.

        `deliver` gets each step's outputs; `failed` gets one line if a step raises, after which no step runs any more.
        Both are called on the engine's thread.
        """
        self._thread = threading.Thread(target=self._run, args=(deliver, failed), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Raises: ValueError: the engine refuses the request."""
        self.loaded.result().engine.submit(request)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End a request at the end of the running step; an unknown id is ignored."""
        self.loaded.result().engine.cancel(request_id)
        self._wake.set()

    def stop(self, timeout: float) -> bool:
        """Stop after the running step and close the engine. False: the step did not end in time."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, deliver: Callable[[Sequence[Output]], object], failed: Callable[[str], object]) -> None:
        try:
            loaded = self._open()
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(loaded)
        try:
            self._step_until_stopped(loaded.engine, deliver)
        except BaseException as error:
            log.exception("the engine failed in a step")
            failed(f"{type(error).__name__}: {error}")
        finally:
            loaded.engine.close()

    def _step_until_stopped(self, engine: StepsRequests, deliver: Callable[[Sequence[Output]], object]) -> None:
        while not self._stopping:
            if not engine.has_work:
                self._wake.wait()
                self._wake.clear()
            elif outputs := engine.step():
                deliver(outputs)
