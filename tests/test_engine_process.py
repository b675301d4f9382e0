"""The engine behind its socket: routing, cancellation, clients that misbehave, and an engine that dies."""

import os
import queue
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import serving_runner
from scripted_engine import INFO, ScriptedEngine, ScriptedTokenizer, connected, served

from hybridtrt.runtime.client import EngineClient, EngineUnavailableError
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.engine_process import claim_socket
from hybridtrt.runtime.protocol import FrameDecoder, encode, submit
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.server import ServerLimits
from hybridtrt.runtime.submission import Submission


@pytest.fixture
def path(tmp_path):
    return tmp_path / "engine.sock"


@pytest.fixture
def engine():
    return ScriptedEngine()


def ask(client, prompt=(1,), max_tokens=4, sampling=None, **fields):
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt is not None:
        fields["input_ids"] = prompt
    return Submission(client.new_id(), sampling=SamplingParams(max_tokens=max_tokens, **sampling or {}), **fields)


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
    return value


def start(client, submission):
    """Submit, and wait for the first reply; the replies come in the queue."""
    replies = queue.SimpleQueue()
    client.submit(submission, replies.put)
    replies.get(timeout=5)
    return replies


def rest(replies):
    """What is left of a stream."""
    received = [replies.get(timeout=5)]
    while received[-1].finish_reason is None:
        received.append(replies.get(timeout=5))
    return received


def tokens(replies):
    return [token for reply in replies for token in reply.token_ids]


def test_a_request_streams_its_tokens(engine, path):
    with served(engine, path), connected(path) as client:
        assert client.info == INFO
        replies = list(client.stream(ask(client, (7, 9)), timeout=5))
        assert tokens(replies) == [10, 11, 12, 13]
        assert [r.num_prompt_tokens for r in replies] == [2, None, None, None]
        assert replies[-1].finish_reason == "length"
    assert engine.closed
    assert len(engine.step_threads) == 1
    assert not path.exists()


def test_text_and_messages_are_tokenised_in_the_engine_process(engine, path):
    with served(engine, path, ScriptedTokenizer()), connected(path) as client:
        assert tokens(client.stream(ask(client, "3 5"), timeout=5)) == [6, 7, 8, 9]
        assert tokens(client.stream(ask(client, None, messages="[{}]"), timeout=5)) == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("prompt", "code", "error"),
    [
        ((), "invalid_argument", "the prompt is empty"),
        ("", "invalid_argument", "the prompt is empty"),
        ("no numbers", "invalid_argument", "invalid literal"),
        ("explode", "internal", "RuntimeError: tokenizer exploded"),
        ((666,), "internal", "RuntimeError: a bug"),
    ],
)
def test_refusals_are_one_line_and_others_go_on(engine, path, prompt, code, error):
    with served(engine, path, ScriptedTokenizer()), connected(path) as client:
        other = start(client, ask(client, max_tokens=10**9))
        (reply,) = client.stream(ask(client, prompt), timeout=5)
        assert (reply.finish_reason, reply.code) == ("error", code)
        assert error in reply.error
        assert "\n" not in reply.error
        assert other.get(timeout=5).finish_reason is None


def test_text_without_a_tokenizer_is_refused(engine, path):
    with served(engine, path), connected(path) as client:
        (reply,) = client.stream(ask(client, "1"), timeout=5)
        assert (reply.code, reply.finish_reason) == ("invalid_argument", "error")
        assert "no tokenizer" in reply.error


def test_a_request_ends_with_the_last_of_its_answers(engine, path):
    with served(engine, path), connected(path) as client:
        submission = ask(client, (7,), max_tokens=4, sampling={"n": 3})
        replies = list(client.stream(submission, timeout=5))
        assert [[r.token_ids[0] for r in replies if r.index == i] for i in range(3)] == [
            [8, 9, 10, 11],
            [8, 9, 10],
            [8, 9],
        ]
        assert [(r.index, r.more) for r in replies if r.finish_reason] == [(2, True), (1, True), (0, False)]
        assert [r.num_prompt_tokens for r in replies if r.num_prompt_tokens is not None] == [1]
        assert tokens(client.stream(replace(submission, sampling=SamplingParams(2)), timeout=5)) == [
            8,
            9,
        ]  # the id is free


def test_the_whole_request_reaches_the_engine(engine, path):
    sampling = {"logit_bias": ((5, 1.5),), "bad_token_ids": ((1, 2), (3,)), "guide_type": "regex", "guide": "a+"}
    more = {"priority": 0.75, "allotted_time_ms": 5000, "cache_salt": "tenant", "logit_bias_words": (("7", -2.0),)}
    with served(engine, path, ScriptedTokenizer()), connected(path) as client:
        list(client.stream(ask(client, "3 5", sampling=sampling, **more), timeout=5))
        (reply,) = client.stream(ask(client, (3,), logit_bias_words=(("7 8", 1.0),)), timeout=5)
        assert (reply.code, reply.error) == (
            "invalid_argument", "the word '7 8' with a bias is 2 tokens, expected a single token"
        )  # fmt: skip
    (request,) = engine.submitted
    expected = SamplingParams(4, **sampling | {"logit_bias": ((5, 1.5), (7, -2.0))})
    assert request == Request(request.id, (3, 5), expected, 0.75, 5000, "tenant")


def test_one_message_a_step_and_connection(engine, path):
    engine.gate.clear()
    with served(engine, path), raw(path) as (connection, decoder):
        for i in range(20):
            connection.sendall(
                encode(submit(Submission(str(i), input_ids=(i,), sampling=SamplingParams(max_tokens=3))))
            )
        until(lambda: engine.statistics()["running"] == 20)
        engine.gate.set()
        frames = receive(connection, decoder, 4)
        assert [f["type"] for f in frames] == ["hello", "outputs", "outputs", "outputs"]
        assert [len(f["outputs"]) for f in frames[1:]] == [20, 20, 20]


def test_requests_of_two_clients_with_equal_ids_do_not_meet(engine, path):
    engine.gate.clear()
    with served(engine, path), connected(path) as one, connected(path) as two:
        streams = [c.stream(ask(c, (n,)), timeout=5) for c, n in ((one, 100), (two, 200))]
        engine.gate.set()
        assert [tokens(s) for s in streams] == [[101, 102, 103, 104], [201, 202, 203, 204]]


def test_cancel_ends_the_stream_and_frees_the_request(path):
    engine = ScriptedEngine(0.005)
    with served(engine, path), connected(path) as client:
        submission = ask(client, max_tokens=10**9)
        replies = start(client, submission)
        client.cancel(submission.id)
        client.cancel(submission.id)
        client.cancel("unknown")
        assert rest(replies)[-1].finish_reason == "cancelled"
        assert client.statistics()["running"] == 0


def test_cancel_while_the_prompt_is_tokenised(engine, path):
    class Slow(ScriptedTokenizer):
        def encode(self, text, add_special_tokens=True):
            started.set()
            assert go.wait(5)
            return super().encode(text)

    started, go = threading.Event(), threading.Event()
    with served(engine, path, Slow()), connected(path) as client:
        replies = queue.SimpleQueue()
        submission = ask(client, "1", max_tokens=10**9)
        client.submit(submission, replies.put)
        assert started.wait(5)
        client.cancel(submission.id)
        client.statistics()  # the cancel has been read
        go.set()
        assert replies.get(timeout=5).finish_reason == "cancelled"
        assert engine.steps == 0


@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
def test_a_request_that_is_given_up_while_the_engine_takes_it_in(engine, path, leave):
    class Slow(ScriptedEngine):
        def submit(self, request):
            started.set()
            assert go.wait(5)
            super().submit(request)

    started, go, engine = threading.Event(), threading.Event(), Slow(0.005)
    with served(engine, path), connected(path) as other, connected(path) as client:
        replies = queue.SimpleQueue()
        submission = ask(client, max_tokens=10**9)
        client.submit(submission, replies.put)
        assert started.wait(5)
        if leave == "cancel":
            client.cancel(submission.id)
            client.statistics()  # the cancel has been read
        else:
            client.close()
            until(lambda: not replies.empty())
        go.set()
        until(lambda: engine.steps and other.statistics()["running"] == 0)
        assert rest(replies)[-1].finish_reason == ("cancelled" if leave == "cancel" else "error")


def test_stop_cancels_by_tag_on_all_connections(path):
    engine = ScriptedEngine(0.005)
    with served(engine, path), connected(path) as one, connected(path) as two:
        stopped = [start(c, ask(c, max_tokens=10**9, tag="x")) for c in (one, two)]
        other = start(one, ask(one, max_tokens=10**9))
        two.stop("x")
        two.stop("")
        assert [rest(r)[-1].finish_reason for r in stopped] == ["cancelled", "cancelled"]
        other.get(timeout=5)
        assert two.statistics()["running"] == 1


def test_leaving_a_stream_or_disconnecting_cancels(path):
    engine = ScriptedEngine(0.005)
    with served(engine, path), connected(path) as client:
        stream = client.stream(ask(client, max_tokens=10**9), timeout=5)
        next(stream)
        stream.close()
        until(lambda: client.statistics()["running"] == 0)
        with connected(path) as other:
            for _ in range(3):
                start(other, ask(other, max_tokens=10**9))
        until(lambda: client.statistics()["running"] == 0)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 2**32 - 1),
        struct.pack(">I", 5) + b"hello",
        struct.pack(">I", 50_000) + b"[" * 50_000,
        encode({"type": "reboot"}),
        encode({"type": "cancel"}),
        encode({"type": "submit", "id": "1"}),
        encode({"type": "submit", "id": "1", "input_ids": [1], "sampling": {"max_tokens": "x"}}),
        encode(submit(Submission("1", input_ids=(1,), sampling=SamplingParams(max_tokens=10**9)))) * 2,
    ],
)
def test_a_malformed_frame_ends_that_connection_only(path, data):
    engine = ScriptedEngine(0.005)
    with served(engine, path), connected(path) as client, raw(path) as (connection, decoder):
        other = start(client, ask(client, max_tokens=10**9))
        connection.sendall(data)
        frames = receive(connection, decoder, None)
        assert frames[0]["type"] == "hello"
        assert frames[-1]["type"] == "error"
        assert len(frames[-1]["error"]) < 300
        other.get(timeout=5)
        until(lambda: client.statistics()["running"] == 1)


def test_a_client_that_never_reads_is_dropped_and_blocks_nobody(engine, path):
    limits = ServerLimits(max_outbound_bytes=100_000, drain_seconds=0.1)
    with served(engine, path, limits=limits), connected(path) as client, raw(path) as (connection, _):
        for i in range(50):
            submission = Submission(str(i), input_ids=(1,), sampling=SamplingParams(max_tokens=10**9))
            connection.sendall(encode(submit(submission)))
        until(lambda: client.statistics()["running"] == 50)
        assert len(tokens(client.stream(ask(client, max_tokens=20), timeout=5))) == 20
        until(lambda: client.statistics()["running"] == 0, 20)


def test_the_queue_is_bounded(path):
    engine = ScriptedEngine(0.005)
    with served(engine, path, limits=ServerLimits(max_queue_size=2, drain_seconds=0)), connected(path) as client:
        for _ in range(2):
            start(client, ask(client, max_tokens=10**9))
        (reply,) = client.stream(ask(client), timeout=5)
        assert (reply.code, reply.error) == ("unavailable", "2 requests are in the server already")


def test_a_step_that_raises_fails_every_request_with_one_line(path):
    engine = ScriptedEngine(0.005)
    with served(engine, path), connected(path) as client:
        streams = [start(client, ask(client, max_tokens=10**9)) for _ in range(3)]
        engine.broken = RuntimeError("pool is damaged")
        for replies in streams:
            last = rest(replies)[-1]
            assert (last.finish_reason, last.code) == ("error", "unavailable")
            assert last.error == "the engine failed: RuntimeError: pool is damaged"
        with pytest.raises(EngineUnavailableError, match="not available"):
            until(lambda: client.submit(ask(client), lambda reply: None))


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(path):
    engine = ScriptedEngine(0.01)
    with served(engine, path, limits=ServerLimits(drain_seconds=5)) as stop, connected(path) as client:
        replies = start(client, ask(client, max_tokens=30))
        ending = threading.Thread(target=stop)
        ending.start()
        until(lambda: not path.exists())
        (refused,) = client.stream(ask(client), timeout=5)
        assert (refused.code, refused.error) == ("unavailable", "the server is shutting down")
        last = rest(replies)
        assert last[-1].finish_reason == "length"
        assert len(tokens(last)) == 29
        ending.join()


def test_shutdown_ends_what_does_not_finish(path):
    engine = ScriptedEngine(0.005)
    with served(engine, path, limits=ServerLimits(drain_seconds=0.1)) as stop, connected(path) as client:
        replies = start(client, ask(client, max_tokens=10**9))
        stop()
        last = rest(replies)[-1]
        assert (last.finish_reason, last.error) == ("error", "the server is shutting down")


def test_the_client_reports_a_missing_engine_and_comes_back(path):
    client = EngineClient(path, retry_seconds=0.02)
    try:
        with pytest.raises(EngineUnavailableError, match="not running"):
            client.wait_ready(0.1)
        with pytest.raises(EngineUnavailableError, match="not running, or still loading"):
            client.submit(ask(client), lambda reply: None)
        for _ in range(2):
            with served(ScriptedEngine(), path):
                client.wait_ready(5)
                assert tokens(client.stream(ask(client), timeout=5)) == [2, 3, 4, 5]
            until(lambda: client.info is None)
    finally:
        client.close()


def test_a_client_that_closes_ends_its_own_requests(path):
    with served(ScriptedEngine(0.005), path):
        with connected(path) as client:
            replies = start(client, ask(client, max_tokens=10**9))
        assert (last := rest(replies)[-1]).finish_reason == "error"
        assert last.code == "unavailable"


def test_a_socket_in_use_and_a_stale_one(path):
    with served(ScriptedEngine(), path), connected(path):
        with pytest.raises(ValueError, match="another engine process listens on"):
            claim_socket(path)
        with pytest.raises(ValueError, match="longer than 107 bytes"):
            claim_socket(path.parent / ("x" * 120))
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with served(ScriptedEngine(), path), connected(path) as client:
        assert client.info == INFO


PROGRAM = [sys.executable, "-P", "-m", "hybridtrt.runtime.engine_process"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def launch(path, tmp_path):
    """Starts an engine process of its own."""
    folder = serving_runner.engine_folder(tmp_path / "engine", text=False)
    started = []

    def start(*options, before=()):
        command = [*before, *PROGRAM, "--engine", str(folder), "--socket", str(path), *options]
        started.append(subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_process_serves_a_real_engine_and_ends_on_sigterm(launch, path):
    process = launch("--runner-factory", "serving_runner:steady", "--max-batch-size", "3", "--no-prefix-cache")
    with connected(path) as client:
        info = serving_runner.INFO
        assert (client.info.vocab_size, client.info.max_seq_len) == (info.vocab_size, info.max_seq_len)
        assert (client.info.max_batch_size, client.info.max_num_tokens) == (3, info.max_num_tokens)
        (expected,) = Engine(serving_runner.make(0)).generate([Request("1", (1, 2), SamplingParams(9))])
        assert tokens(client.stream(ask(client, (1, 2), max_tokens=9), timeout=10)) == list(expected.token_ids)
        assert client.statistics()["slots"]["free"] == 64
        process.terminate()
        assert process.wait(10) == 0
        assert not path.exists()


def test_the_process_ends_with_its_parent(launch, path):
    shell = ["bash", "-c", '"$@"; true', "bash"]  # bash stays between this process and the engine
    parent = launch("--runner-factory", "serving_runner:steady", "--exit-with-parent", before=shell)
    with connected(path) as client:
        replies = start(client, ask(client, max_tokens=2000))
        parent.kill()
        assert rest(replies)[-1].finish_reason == "error"
        until(lambda: not path.exists(), 10)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--runner-factory", "serving_runner:unloadable"), "error: .*built by version 99"),
        (("--runner-factory", "nowhere:make"), "error: ModuleNotFoundError: No module named 'nowhere'"),
        (("--threads", "0"), "error: threads=0 is not positive"),
        ((), "error: .*config.json"),
    ],
)
def test_a_process_that_cannot_start_says_why_in_one_line(launch, options, error):
    process = launch(*options)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.fullmatch(error + ".*\n", printed), printed


@contextmanager
def raw(path):
    """A connection without a client's good manners, and a decoder of what it receives."""
    until(path.exists)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        yield connection, FrameDecoder()


def receive(connection, decoder, count):
    """The next `count` messages; None: all until the engine hangs up."""
    messages = []
    while (count is None or len(messages) < count) and (data := connection.recv(65536)):
        messages += decoder.feed(data)
    return messages
