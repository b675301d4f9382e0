"""A server in a process of its own: how it ends, and what it leaves behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import serving_runner
import tritonclient.grpc as triton_grpc

from hybridtrt.model_repo.clients import ClientError, http_generate, http_stream
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Request, SamplingParams

pytestmark = pytest.mark.server
TESTS = Path(__file__).parent

PROGRAM = """
import sys
from pathlib import Path
from hybridtrt.model_repo.supervisor import ServeError, ServeOptions, run_server
engine, state, factory, port = sys.argv[1:]
try:
    run_server(ServeOptions(Path(engine), int(port), 0, 0, state_dir=Path(state), max_restarts=2, drain_seconds=2,
               runner_factory=factory), lambda line: print(line, flush=True))
except ServeError as error:
    sys.exit(f"error: {error}")
"""


class Serving:
    """A server in a process of its own."""

    def __init__(self, engine_dir, state, factory="serving_runner:steady", port=0):
        command = [sys.executable, "-P", "-c", PROGRAM, str(engine_dir), str(state), factory, str(port)]
        self.state = state
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self):
        found = {}
        for line in self.process.stdout:
            name, _, found[name] = line.strip().partition(" ")
            if name == "ready;":
                break
        self.url = found["HTTP"].strip().removesuffix("/v2/models/ensemble/generate")
        self.grpc = found["gRPC"].strip()
        self.prefix = (self.state / "shm-prefix").read_text()
        self.offspring = {
            int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._is_ours(entry)
        }
        assert len(self.offspring) == 4  # the engine, tritonserver and two stubs
        for pid in self.offspring:
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        return self

    def _is_ours(self, entry):
        try:
            return str(self.state) in (entry / "cmdline").read_text() and int(entry.name) != self.process.pid
        except OSError:
            return False

    def left(self):
        """Processes of this server that still run."""
        return {pid for pid in self.offspring if Path(f"/proc/{pid}").exists() and self._is_ours(Path(f"/proc/{pid}"))}

    def shm(self):
        return [name for name in os.listdir("/dev/shm") if name.startswith(self.prefix)]

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def serving(tmp_path):
    engine_dir = serving_runner.engine_folder(tmp_path / "engine", text=False)
    started = []

    def start(**options):
        started.append(Serving(engine_dir, tmp_path / "state", **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_sigterm_lets_requests_finish_and_leaves_nothing(serving):
    one = serving().wait_ready()
    assert one.shm()
    with pytest.raises(ClientError, match="the engine folder has no tokenizer: send token ids instead of text"):
        http_generate(one.url, "ensemble", {"text_input": "a", "max_tokens": 1})
    engine = Engine(serving_runner.make(0))
    (expected,) = engine.generate([Request("1", (1, 2, 3), SamplingParams(100))])
    fields = {"input_ids": [1, 2, 3], "request_output_len": 100, "streaming": True}
    stream = http_stream(one.url, "tensorrt_llm", fields)
    received = [next(stream)]
    one.process.send_signal(signal.SIGTERM)
    received += stream
    ids = [token for event in received for token in np.atleast_1d(event["output_ids"])]
    assert ids == list(expected.token_ids)
    assert one.process.wait(20) == 0
    assert not one.left()
    assert not one.shm()
    assert not (one.state / "engine.sock").exists()


def test_an_open_grpc_stream_does_not_hold_up_the_end(serving):
    one = serving().wait_ready()
    client = triton_grpc.InferenceServerClient(one.grpc)
    client.start_stream(lambda result, error: None)
    start = time.monotonic()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(20) == 0
    assert time.monotonic() - start < 15
    client.stop_stream(cancel_requests=True)
    client.close()
    assert not one.left()


def test_a_killed_supervisor_leaves_no_process_and_the_next_start_cleans_up(serving):
    one = serving().wait_ready()
    one.process.kill()
    one.process.wait()
    deadline = time.monotonic() + 10
    while one.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not one.left()
    again = serving().wait_ready()
    assert not one.shm()
    again.process.send_signal(signal.SIGINT)
    assert again.process.wait(20) == 0
    assert not again.left()


def test_a_port_in_use_is_one_line(serving):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = serving(port=taken.getsockname()[1])
        _, errors = one.process.communicate(timeout=20)
        assert one.process.returncode == 1
        assert errors == f"error: http_port={taken.getsockname()[1]} cannot be used: Address already in use\n"


def test_an_engine_that_does_not_load_is_one_line(serving, tmp_path):
    _, errors = serving(factory="serving_runner:unloadable").process.communicate(timeout=20)
    assert errors.startswith(f"error: engine exited with status 1: {tmp_path}/engine/config.json: built by version 99")
    assert errors.count("\n") == 1


def test_a_crash_loop_ends(serving):
    one = serving(factory="serving_runner:crashing").wait_ready()
    for _ in range(200):
        if one.process.poll() is not None:
            break
        try:
            http_generate(one.url, "tensorrt_llm", {"input_ids": [1], "request_output_len": 1}, 5)
        except ClientError:
            time.sleep(0.1)
    _, errors = one.process.communicate(timeout=10)
    assert one.process.returncode == 1
    assert errors == "error: the engine process exited with status 7, after 2 restarts within 60 s\n"
    assert not one.left()
