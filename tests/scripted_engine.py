"""An engine without a model, for tests of what stands around it: token k of a request is its last prompt token + k.

Of several answers to one request the i-th is i tokens shorter, so that they end one after another, the first one last.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

from hybridtrt.runtime.client import EngineClient
from hybridtrt.runtime.engine_process import finish, serve
from hybridtrt.runtime.engine_thread import LoadedEngine
from hybridtrt.runtime.protocol import EngineInfo
from hybridtrt.runtime.request import Output
from hybridtrt.runtime.server import ServerLimits

INFO = EngineInfo(1000, 8, 256, 512, 32, 9, {"full": 64}, has_tokenizer=True)


class ScriptedTokenizer:
    """Text "12 13" is token ids 12, 13; messages are a JSON list that is counted."""

    def encode(self, text, add_special_tokens=True):
        if text == "explode":
            raise RuntimeError("tokenizer exploded")
        return [int(word) for word in text.split()]

    def encode_messages(self, messages):
        return [len(messages)]


class ScriptedEngine:
    """Steps every request by one token. `gate` closed: a step waits. `broken` set: a step raises."""

    def __init__(self, step_seconds=0.0):
        self.gate = threading.Event()
        self.gate.set()
        self.broken = None
        self.closed = False
        self.steps = 0
        self.step_seconds = step_seconds
        self.step_threads = set()
        self._lock = threading.Lock()
        self._requests = {}
        self._cancelled = []
        self.submitted = []

    @property
    def has_work(self):
        return bool(self._requests or self._cancelled)

    def submit(self, request):
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        if request.prompt_ids[0] == 666:
            raise RuntimeError("a bug")
        self.submitted.append(request)
        with self._lock:
            self._requests[request.id] = [request, 0]

    def cancel(self, request_id):
        with self._lock:
            self._cancelled.append(request_id)

    def step(self):
        self.steps += 1
        self.step_threads.add(threading.get_ident())
        self.gate.wait(30)
        time.sleep(self.step_seconds)
        if self.broken:
            raise self.broken
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            outputs = [Output(i, finish_reason="cancelled") for i in cancelled if self._requests.pop(i, None)]
            for request_id, entry in list(self._requests.items()):
                entry[1] += 1
                outputs += self._outputs(*entry)
                if outputs[-1].ends_request:
                    del self._requests[request_id]
        return outputs

    @staticmethod
    def _outputs(request, step):
        token, length = request.prompt_ids[-1] + step, request.params.max_tokens
        outputs = []
        for i in reversed(range(min(request.params.n, length - step + 1))):
            reason = "length" if step == length - i else None
            outputs.append(Output(request.id, (token,), f"{token} ", finish_reason=reason, index=i, more=i > 0))
        return outputs

    def statistics(self):
        return {"running": len(self._requests), "steps": self.steps}

    def close(self):
        self.closed = True


@contextmanager
def served(engine, path, tokenizer=None, limits=None, info=INFO):
    """The engine behind a socket, served by a thread; yields what stops it: `stop(error)`."""
    loop = asyncio.new_event_loop()
    stop = loop.create_future()
    loaded = LoadedEngine(engine, info, tokenizer)
    limits = limits or ServerLimits(drain_seconds=0.2)
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(lambda: loaded, path, limits, stop),))
    thread.start()

    def end(error=None):
        if thread.is_alive():
            loop.call_soon_threadsafe(finish, stop, error)
        thread.join(10)
        assert not thread.is_alive()

    try:
        yield end
    finally:
        engine.gate.set()
        end()
        loop.close()


@contextmanager
def connected(path):
    """A client that is connected."""
    client = EngineClient(path, retry_seconds=0.02)
    try:
        client.wait_ready(30)
        yield client
    finally:
        client.close()
