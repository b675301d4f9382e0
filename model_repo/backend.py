"""A decoupled Triton model of the Python backend: a thin client of the engine process.

`execute` checks a request and hands it on; the client's reader thread takes the replies, sender threads send them.
A poller tells the engine of clients that have gone, a watchdog ends the process when tritonserver has ended.
Only Triton's stub can import this module.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import triton_python_backend_utils as pb_utils

from hybridtrt.model_repo.inputs import Inputs, RequestError, Tensors
from hybridtrt.model_repo.interface import NOTHING, Interface, Progress, Stop
from hybridtrt.model_repo.metrics import Metrics
from hybridtrt.model_repo.streams import Senders, Stream
from hybridtrt.model_repo.text_interface import TextInterface
from hybridtrt.model_repo.token_interface import TokenInterface
from hybridtrt.runtime.client import EngineClient, EngineUnavailableError
from hybridtrt.runtime.protocol import ErrorCode, ProtocolError, Reply

log = logging.getLogger("hybridtrt.model")
WATCHDOG_SECONDS = 0.5
_CODES = {"invalid_argument": "INVALID_ARG", "unavailable": "UNAVAILABLE", "internal": "INTERNAL"}


class TritonResponder:
    """Triton's response sender of one request. The last response carries the FINAL flag, exactly once."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, tensors: Tensors, final: bool) -> None:
        outputs = [pb_utils.Tensor(name, value) for name, value in tensors.items()]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb_utils.InferenceResponse(outputs), flags=flags)

    def fail(self, error: str, code: ErrorCode) -> None:
        error_code = getattr(pb_utils.TritonError, _CODES[code])
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(error, error_code))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class Model:
    """What both models share; a subclass chooses the interface."""

    interface: Interface

    def initialize(self, args: dict[str, str]) -> None:
        """Triton calls this once. The engine may still be away: then requests fail until it is there."""
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="watchdog", daemon=True).start()
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._client = EngineClient(parameters["engine_socket"])
        self._senders = Senders(int(parameters["sender_threads"]))
        self._live: set[Stream] = set()
        self._answered: Counter[str] = Counter()
        self._closing = threading.Event()
        self._every(int(parameters["cancellation_check_period_ms"]) / 1000, self._poll_cancelled, "poller")
        labels = {"model": args["model_name"], "version": args["model_version"]}
        engine_metrics = parameters["engine_metrics"] == "true"
        metrics = Metrics(pb_utils.MetricFamily, labels, self._client, self._answered, engine_metrics)
        self._every(int(parameters["stats_check_period_ms"]) / 1000, metrics.update, "metrics")

    def execute(self, requests: list[Any]) -> None:
        """Start requests. Each ends later, through its response sender."""
        for request in requests:
            responder = TritonResponder(request)
            try:
                self._start(request, responder)
            except (RequestError, ProtocolError) as error:
                self._refuse(responder, str(error), "invalid_argument")
            except EngineUnavailableError as error:
                self._refuse(responder, str(error), "unavailable")
            except Exception as error:
                log.exception("a request could not be started")
                self._refuse(responder, f"{type(error).__name__}: {error}", "internal")

    def finalize(self) -> None:
        """Triton calls this when the model is unloaded and its requests have ended."""
        self._closing.set()
        self._client.close()
        self._senders.close()

    def _start(self, request: Any, responder: TritonResponder) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = {"timeout": request.timeout()} | json.loads(request.parameters() or "{}")
        info = self._client.info
        ask = self.interface.parse(Inputs(tensors, parameters, None if info is None else info.vocab_size))
        tag = request.request_id() or str(parameters.get("id", ""))  # HTTP's generate has no other place for it
        if isinstance(ask, Stop):
            if not tag:
                raise RequestError("stop needs a request id, that of the request to stop")
            self._client.stop(tag)
            stopped = [Reply(tag, finish_reason="cancelled")]
            responder.send(self.interface.render(NOTHING, stopped, Progress()), final=True)
            return
        stream = Stream(self.interface, ask, responder, self._client.new_id(), self._ended)
        self._live.add(stream)
        submission = replace(ask.submission, id=stream.request_id, tag=tag)
        try:
            self._client.submit(submission, self._senders.attach(stream))
        except BaseException:
            self._live.discard(stream)
            raise

    def _refuse(self, responder: TritonResponder, error: str, code: ErrorCode) -> None:
        self._answered["error"] += 1
        responder.fail(error, code)

    def _ended(self, stream: Stream) -> None:
        self._live.discard(stream)
        self._answered[stream.finish_reason] += 1
        if stream.finish_reason == "error":  # other answers, or what could not be sent, may go on in the engine
            self._client.cancel(stream.request_id)

    def _poll_cancelled(self) -> None:
        for stream in list(self._live):
            if stream.poll_cancelled():
                self._client.cancel(stream.request_id)

    def _every(self, seconds: float, action: Any, name: str) -> None:
        def run() -> None:
            while not self._closing.wait(seconds):
                try:
                    action()
                except Exception:
                    log.exception("%s failed", name)

        threading.Thread(target=run, name=name, daemon=True).start()


class TextModel(Model):
    """The model `ensemble`."""

    interface = TextInterface()


class TokenModel(Model):
    """The model `tensorrt_llm`."""

    interface = TokenInterface()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCHDOG_SECONDS)
    os._exit(1)
