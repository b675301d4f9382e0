"""The real tritonserver in front of an engine process without a network: streams, cancellation, faults, a clean end."""

import json
import os
import queue
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import checkpoints
import engines
import numpy as np
import pytest
import serving_runner
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from hybridtrt.model_repo import triton
from hybridtrt.model_repo.client_cli import grpc_main, http_main
from hybridtrt.model_repo.clients import ClientError, GrpcClient, http_generate, http_stream
from hybridtrt.model_repo.supervisor import ServeError, ServeOptions, Server
from hybridtrt.runtime.client import EngineClient
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.load_engine import load_engine
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.run_options import RunOptions
from hybridtrt.runtime.tokenizer import load_tokenizer

pytestmark = pytest.mark.server
TESTS = Path(__file__).parent
ENDLESS = {"input_ids": [1, 2, 3], "request_output_len": 4000, "streaming": True}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    return serving_runner.engine_folder(tmp_path_factory.mktemp("serve") / "engine")


@pytest.fixture(scope="module")
def server(engine_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        options = ServeOptions(
            engine_dir, 0, 0, 0, state_dir=engine_dir.parent / "state", max_restarts=20, drain_seconds=0.5,
            runner_factory="serving_runner:steady",
        )  # fmt: skip
        with Server(options, lambda line: None) as server:
            yield server
    assert server.error is None


@pytest.fixture(scope="module")
def grpc(server):
    with GrpcClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def engine(server):
    """A connection of the test's own to the engine process, for its statistics."""
    client = EngineClient(server.engine_socket)
    client.wait_ready(10)
    yield client
    client.close()


@pytest.fixture(scope="module")
def offline(engine_dir):
    """What the same engine gives in process."""
    tokenizer = load_tokenizer(engine_dir)
    engine = Engine(serving_runner.make(0), tokenizer)

    def run(prompts, **sampling):
        ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
        params = SamplingParams(**sampling)
        return engine.generate([Request(str(i), tuple(p), params) for i, p in enumerate(ids)])

    return run


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
    return value


def tokens(responses):
    return [int(token) for outputs in responses for token in outputs["output_ids"].reshape(-1)]


def text(events):
    return "".join(event["text_output"] for event in events)


def in_parallel(function, items):
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))


def idle(engine):
    statistics = engine.statistics()
    pages = sum(usage["used"] + usage["promised"] for usage in statistics["pages"].values())
    return statistics["running"] + statistics["waiting"] + statistics["slots"]["used"] + pages == 0


PROMPTS = [f"prompt {i} {'日本語😀' * (i % 4)}" for i in range(32)]
IDS = [tuple(int(x) for x in np.random.default_rng(i).integers(0, 420, 1 + 7 * i % 40)) for i in range(32)]


# Streams


def test_32_concurrent_grpc_streams_equal_the_offline_tokens(grpc, engine, offline):
    expected = offline(IDS, max_tokens=40)
    streams = in_parallel(
        lambda ids: list(grpc.stream("tensorrt_llm", {"input_ids": ids, "request_output_len": 40, "streaming": True})),
        IDS,
    )
    assert [tokens(stream) for stream in streams] == [list(result.token_ids) for result in expected]
    assert all(len(stream) > 5 for stream in streams)
    assert idle(engine)


def test_32_concurrent_sse_streams_equal_the_offline_text_and_the_unstreamed_answer(server, engine, offline):
    expected = offline(PROMPTS, max_tokens=40)
    url = server.http_url

    def ask(prompt):
        fields = {"text_input": prompt, "max_tokens": 40}
        return list(http_stream(url, "ensemble", fields | {"stream": True})), http_generate(url, "ensemble", fields)

    answers = in_parallel(ask, PROMPTS)
    assert [text(events) for events, _ in answers] == [result.text for result in expected]
    assert [answer["text_output"] for _, answer in answers] == [result.text for result in expected]
    assert all(len(events) > 5 for events, _ in answers)
    assert all("finish_reason" not in event for events, _ in answers for event in events[:-1])
    assert idle(engine)


def test_both_models_and_both_protocols_share_one_scheduler(server, grpc, engine):
    streams = [grpc.stream("tensorrt_llm", ENDLESS), http_stream(server.http_url, "tensorrt_llm", ENDLESS)]
    fields = {"text_input": "a", "max_tokens": 4000, "stream": True}
    streams += [grpc.stream("ensemble", fields), http_stream(server.http_url, "ensemble", fields)]
    for stream in streams:
        next(stream)
    assert engine.statistics()["running"] == 4
    for stream in streams:
        stream.close()
    until(lambda: idle(engine), 5)


def test_the_text_interface_as_tensorrt_llm_documents_it(server, offline):
    fields = {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": ""}
    answer = http_generate(server.http_url, "ensemble", fields)
    (expected,) = offline([fields["text_input"]], max_tokens=20)
    assert answer["text_output"] == expected.text
    assert answer["finish_reason"] == "length"
    assert answer["model_name"] == "ensemble"


def test_options_of_a_text_request(server, grpc, offline):
    (plain,) = offline(["hello"], max_tokens=20, return_log_probs=True)
    word = plain.text[3:5]
    (stopped,) = offline(["hello"], max_tokens=20, stop_words=(word,))
    fields = {"text_input": "hello", "max_tokens": 20}
    ask = lambda **more: http_generate(server.http_url, "ensemble", fields | more)  # noqa: E731
    assert ask(stop_words=word)["text_output"] == stopped.text
    assert ask(stop_words=[word, "zzz"])["finish_reason"] == "stop"
    assert ask(exclude_input_in_output=False)["text_output"] == "hello" + plain.text
    assert ask(temperature=0.0)["text_output"] == ask(top_k=1)["text_output"] == plain.text
    random = [ask(temperature=2.0, seed=5), ask(temperature=2.0, random_seed=5), ask(temperature=2.0, seed=6)]
    assert random[0]["text_output"] == random[1]["text_output"] != random[2]["text_output"]
    counted = ask(return_num_input_tokens=True, return_num_output_tokens=True, return_log_probs=True)
    assert counted["num_output_tokens"] == 20
    assert counted["num_input_tokens"] > 0
    assert counted["output_log_probs"] == pytest.approx(plain.log_probs, abs=1e-5)
    assert counted["cum_log_probs"] == pytest.approx(sum(plain.log_probs), abs=1e-4)
    streamed = list(grpc.stream("ensemble", fields | {"stream": True, "return_log_probs": True}))
    log_probs = np.concatenate([outputs["output_log_probs"].reshape(-1) for outputs in streamed])
    assert log_probs == pytest.approx(plain.log_probs, abs=1e-5)
    assert streamed[-1]["cum_log_probs"][0, 0] == pytest.approx(sum(plain.log_probs), abs=1e-4)


def test_messages_go_through_the_chat_template(server, offline):
    (expected,) = offline(["<|user|>hi"], max_tokens=10)
    messages = json.dumps([{"role": "user", "content": "hi"}])
    answer = http_generate(server.http_url, "ensemble", {"messages": messages, "max_tokens": 10})
    assert answer["text_output"] == expected.text


def test_options_of_a_token_request(server, offline):
    (plain,) = offline([(1, 2, 3)], max_tokens=10)
    ids = list(plain.token_ids)
    ask = lambda **more: http_generate(  # noqa: E731
        server.http_url, "tensorrt_llm", {"input_ids": [1, 2, 3], "request_output_len": 10} | more
    )
    assert ask()["output_ids"] == ids
    assert ask(exclude_input_in_output=False)["output_ids"] == [1, 2, 3, *ids]
    assert ask(input_ids=[1, 2, 3, 9], input_lengths=3)["output_ids"] == ids
    stopped = ask(end_id=ids[4])
    assert stopped["output_ids"] == ids[: ids.index(ids[4]) + 1]
    assert (stopped["finish_reason"], stopped["sequence_length"]) == ("stop", ids.index(ids[4]) + 1)


def answers(stream, n):
    """The token ids of each answer, from responses of one answer each."""
    return [tokens(outputs for outputs in stream if outputs["sequence_index"].tolist() == [[i]]) for i in range(n)]


@pytest.mark.parametrize("n", [2, 5])
def test_several_answers_to_one_request(server, grpc, engine, offline, n):
    """Streams carry one answer in a response; without a stream there is one response with all of them."""
    sampling = {"temperature": 1.0, "seed": 7}
    expected = offline([(1, 2, 3)], max_tokens=12, n=n, **sampling)
    fields = {"input_ids": (1, 2, 3), "request_output_len": 12, "num_return_sequences": n, **sampling}
    streamed = list(grpc.stream("tensorrt_llm", fields | {"streaming": True}))
    assert answers(streamed, n) == [list(result.token_ids) for result in expected]
    assert sum("finish_reason" in outputs for outputs in streamed) == n
    (whole,) = grpc.stream("tensorrt_llm", fields)
    assert whole["output_ids"].tolist() == [[list(result.token_ids) for result in expected]]
    assert whole["sequence_index"].tolist() == [list(range(n))]
    texts = offline(["hello"], max_tokens=12, n=n, **sampling)
    fields = {"text_input": "hello", "max_tokens": 12, "num_return_sequences": n, **sampling}
    answer = http_generate(server.http_url, "ensemble", fields)
    assert answer["text_output"] == [result.text for result in texts]
    events = list(http_stream(server.http_url, "ensemble", fields | {"stream": True}))
    joined = ["".join(e["text_output"] for e in events if e["sequence_index"] == i) for i in range(n)]
    assert joined == answer["text_output"]
    assert idle(engine)


def test_words_and_log_probabilities(grpc, offline):
    (plain,) = offline([(1, 2, 3)], max_tokens=10, top_log_probs=3, prompt_log_probs=2)
    token = plain.token_ids[4]
    (banned,) = offline([(1, 2, 3)], max_tokens=10, bad_token_ids=((token,),))
    assert token not in banned.token_ids
    fields = {"input_ids": (1, 2, 3), "request_output_len": 10}
    (answer,) = grpc.stream("tensorrt_llm", fields | {"top_log_probs": 3, "prompt_log_probs": 2})
    tops = [[list(pair) for pair in zip(*place, strict=True)] for place in zip(
        answer["output_top_token_ids"][0, 0].tolist(), answer["output_top_log_probs"][0, 0].tolist(), strict=True
    )]  # fmt: skip
    assert np.array(tops) == pytest.approx(np.array(plain.top_log_probs), abs=1e-5)
    assert answer["prompt_log_probs"][0] == pytest.approx([value for value, _ in plain.prompt_log_probs], abs=1e-5)
    assert answer["prompt_top_token_ids"].tolist() == [[[i for i, _ in top] for _, top in plain.prompt_log_probs]]
    bias = [0.0] * 420
    bias[token] = -100.0
    for more in ({"bad_words_list": [[token], [1]]}, {"embedding_bias": bias}):
        assert tokens(grpc.stream("tensorrt_llm", fields | more)) == list(banned.token_ids)


def test_a_stream_may_come_in_larger_pieces(grpc, offline):
    (plain,) = offline([(1, 2, 3)], max_tokens=50)
    fields = {"input_ids": (1, 2, 3), "request_output_len": 50, "streaming": True, "stream_interval": 8}
    stream = list(grpc.stream("tensorrt_llm", fields))
    assert tokens(stream) == list(plain.token_ids)
    assert 2 <= len(stream) <= 7


def test_a_request_whose_time_is_over(server, engine):
    for more in ({"allotted_time_ms": 300}, {"timeout": 300_000}):
        answer = http_generate(server.http_url, "tensorrt_llm", {**ENDLESS, "streaming": False, **more})
        assert answer["finish_reason"] == "timed_out"
        assert 0 < answer["sequence_length"] < 1000
    assert idle(engine)


# Cancellation


def cancelled_in(engine, stream, cancel):
    """Seconds from the cancellation of a running stream to the return of its slot and pages."""
    next(stream)
    assert not idle(engine)
    start = time.monotonic()
    cancel()
    until(lambda: idle(engine), 5)
    return time.monotonic() - start


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
@pytest.mark.parametrize("protocol", ["grpc", "sse"])
def test_a_cancelled_stream_gives_its_slot_and_pages_back(server, grpc, engine, model, protocol):
    until(lambda: idle(engine), 5)
    fields = ENDLESS if model == "tensorrt_llm" else {"text_input": "a", "max_tokens": 4000, "stream": True}
    seconds = []
    for _ in range(3):
        ask = grpc.stream if protocol == "grpc" else partial(http_stream, server.http_url)
        stream = ask(model, fields)
        closing = threading.Thread(target=stream.close)
        seconds.append(cancelled_in(engine, stream, closing.start if protocol == "sse" else stream.close))
        if protocol == "sse":
            closing.join()
    assert min(seconds) < 0.2, seconds


def test_all_answers_of_a_cancelled_request_end(server, grpc, engine):
    until(lambda: idle(engine), 5)
    stream = grpc.stream("tensorrt_llm", ENDLESS | {"num_return_sequences": 6, "temperature": 1.0})
    next(stream)
    until(lambda: engine.statistics()["running"] == 6, 5)
    finished = engine.statistics()["finished"]["cancelled"]
    stream.close()
    until(lambda: idle(engine), 5)
    assert engine.statistics()["finished"]["cancelled"] == finished + 6


def test_stop_cancels_the_requests_with_its_id(server, grpc, engine):
    streams = [
        grpc.stream("tensorrt_llm", ENDLESS, request_id="x"),
        grpc.stream("ensemble", {"text_input": "a", "max_tokens": 4000, "stream": True}, request_id="x"),
        grpc.stream("tensorrt_llm", ENDLESS, request_id="y"),
    ]
    for stream in streams:
        next(stream)
    (stopped,) = grpc.stream("tensorrt_llm", {"stop": True}, request_id="x")
    assert stopped["output_ids"].size == 0
    assert [list(stream)[-1]["finish_reason"][0, 0] for stream in streams[:2]] == [b"cancelled", b"cancelled"]
    next(streams[2])
    assert http_generate(server.http_url, "tensorrt_llm", {"stop": True, "id": "y"})["finish_reason"] == "cancelled"
    assert list(streams[2])[-1]["finish_reason"][0, 0] == b"cancelled"
    with pytest.raises(ClientError, match="stop needs a request id"):
        http_generate(server.http_url, "tensorrt_llm", {"stop": True})
    until(lambda: idle(engine), 5)


# Bad input

BAD = [
    ("ensemble", {"text_input": "", "max_tokens": 5}, "the prompt is empty"),
    ("ensemble", {"text_input": "a", "max_tokens": 0}, "max_tokens=0"),
    ("ensemble", {"text_input": "a", "max_tokens": -3}, "max_tokens=-3"),
    ("ensemble", {"text_input": "a", "max_tokens": 10**6}, "exceed max_seq_len=4096"),
    ("ensemble", {"text_input": "zq" * 5000, "max_tokens": 5}, "exceed max_seq_len=4096"),
    ("ensemble", {"text_input": "a"}, "max_tokens is missing"),
    ("ensemble", {"max_tokens": 5}, "exactly one of text_input and messages"),
    ("ensemble", {"messages": "nonsense", "max_tokens": 5}, "messages are not valid JSON"),
    ("ensemble", {"messages": "[]", "max_tokens": 5}, "non-empty list"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "max_token": 7}, "unknown input 'max_token'"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "beam_width": 2}, "beam_width=2 must be 1: beam search"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "num_return_sequences": 0}, "n=0"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "priority": 2.0}, "priority=2.0"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "allotted_time_ms": -1}, "allotted_time_ms=-1"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "embedding_bias_words": "zq"}, "embedding_bias_weights 0"),
    (
        "ensemble",
        {"text_input": "a", "max_tokens": 5, "embedding_bias_words": "zqzq", "embedding_bias_weights": 1.0},
        "'zqzq' with a bias is 4 tokens",
    ),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "guided_decoding_guide": "a"}, "guide"),
    (
        "ensemble",
        {"text_input": "a", "max_tokens": 5, "guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
        "guides need an end token",
    ),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "temperature": -1.0}, "temperature=-1.0"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "top_p": 2.0}, "top_p=2.0"),
    ("ensemble", {"text_input": "a", "max_tokens": 5, "top_k": -2}, "top_k=-2"),
    ("ensemble", {"text_input": "a", "max_tokens": "five"}, "Unable to parse 'data'"),
    ("ensemble", {"text_input": 5, "max_tokens": 5}, "Unable to parse JSON bytes array"),
    ("ensemble", {"text_input": ["a", "b"], "max_tokens": 5}, "batch size does not match"),
    ("tensorrt_llm", {"input_ids": [], "request_output_len": 5}, "the prompt is empty"),
    ("tensorrt_llm", {"input_ids": [420], "request_output_len": 5}, r"token id 420 is not in 0\.\.419"),
    ("tensorrt_llm", {"input_ids": [-1], "request_output_len": 5}, "token id -1"),
    ("tensorrt_llm", {"input_ids": [1.5], "request_output_len": 5}, "Unable to parse 'data'"),
    ("tensorrt_llm", {"input_ids": [1] * 4096, "request_output_len": 1}, "exceed max_seq_len=4096"),
    ("tensorrt_llm", {"request_output_len": 5}, "input_ids is missing"),
    ("nonsense", {"text_input": "a"}, "unknown model: 'nonsense'"),
]


def test_bad_input_gets_a_clear_error_and_other_streams_go_on(server, engine):
    with_others = http_stream(server.http_url, "tensorrt_llm", ENDLESS)
    received = [next(with_others)]
    for model, fields, error in BAD:
        with pytest.raises(ClientError, match=error) as caught:
            http_generate(server.http_url, model, fields)
        assert "\n" not in str(caught.value)
        received.append(next(with_others))
    body = b'{"text_input": "\xff\xfe", "max_tokens": 5}'
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.http_url}/v2/models/ensemble/generate", body)
    assert b"text_input is not valid UTF-8" in refused.value.read()
    with_others.close()
    until(lambda: idle(engine), 5)


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("input_ids", np.array([[1.0]], np.float32), "inference input 'input_ids' data-type is 'FP32', but .* 'INT32'"),
        ("input_ids", np.array([1], np.int32), "unexpected shape for input 'input_ids'|batch"),
        ("input_ids", np.array([[1], [2]], np.int32), "batch-size must be <= 1"),
        ("surprise", np.array([[1]], np.int32), "unexpected inference input 'surprise'"),
        ("beam_width", np.array([[3]], np.int32), "beam_width=3 must be 1: beam search is not supported"),
    ],
)
def test_bad_tensors_over_grpc_get_a_clear_error(server, name, data, error):
    client = triton_grpc.InferenceServerClient(server.grpc_url)
    inputs = {"input_ids": np.array([[1]], np.int32), "request_output_len": np.array([[2]], np.int32)} | {name: data}
    if len(data) == 2:
        inputs["request_output_len"] = np.array([[2], [2]], np.int32)
    made = [
        triton_grpc.InferInput(key, value.shape, np_to_triton_dtype(value.dtype)).set_data_from_numpy(value)
        for key, value in inputs.items()
    ]
    answers = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put(error), headers={"triton_grpc_error": "true"})
    client.async_stream_infer("tensorrt_llm", made)
    problem = answers.get(timeout=5)
    client.stop_stream()
    client.close()
    assert problem.status() in ("StatusCode.INVALID_ARGUMENT", None)  # Triton's own errors carry no status in a stream
    assert re.search(error, problem.message())


def test_streaming_from_generate_says_what_to_use(server):
    with pytest.raises(ClientError, match="use generate stream"):
        http_generate(server.http_url, "ensemble", {"text_input": "a", "max_tokens": 5, "stream": True})


# Health, metrics, clients


def get(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def test_health_and_metrics(server, grpc, engine):
    get(f"{server.http_url}/v2/health/ready")
    get(f"{server.http_url}/v2/models/ensemble/ready")
    stream = grpc.stream("tensorrt_llm", ENDLESS)
    next(stream)

    def metric(name, label):
        pattern = rf'^{name}{{(?=.*="{label}")(?=.*model="tensorrt_llm").* ([0-9.e+]+)$'
        found = re.search(pattern, get(server.metrics_url), re.MULTILINE)
        return float(found[1]) if found else None

    until(lambda: metric("nv_trt_llm_state_slot_metrics", "used") == 1, 3)  # written after what follows
    assert metric("nv_trt_llm_request_metrics", "active") == 1
    assert metric("nv_trt_llm_request_metrics", "max") == 64
    assert metric("nv_trt_llm_kv_cache_block_metrics", "used") > 0
    until(lambda: metric("nv_trt_llm_kv_cache_block_metrics", "tokens_per") == 16, 3)
    stream.close()
    until(lambda: metric("nv_trt_llm_state_slot_metrics", "used") == 0, 3)
    before = metric("nv_trt_llm_response_metrics", "error") or 0
    with pytest.raises(ClientError):
        http_generate(server.http_url, "tensorrt_llm", {"request_output_len": 5})
    until(lambda: metric("nv_trt_llm_response_metrics", "error") == before + 1, 3)


def test_latencies_as_histograms(server, engine):
    """Counts and sums of Triton's histograms are those that the engine has observed."""
    http_generate(server.http_url, "tensorrt_llm", {"input_ids": [1], "request_output_len": 3})
    observed = engine.statistics()["histograms"]
    names = {"queue": "request_queue_time", "first_token": "time_to_first_token"}
    names |= {"per_output_token": "time_per_output_token", "end_to_end": "e2e_request_latency"}

    def metric(name):
        return float(re.search(rf"^trtllm_{name}{{.*}} ([0-9.e+-]+)$", get(server.metrics_url), re.MULTILINE)[1])

    until(lambda: metric("e2e_request_latency_seconds_count") == sum(observed["end_to_end"]["counts"]), 3)
    for histogram, name in names.items():
        assert metric(f"{name}_seconds_count") == sum(observed[histogram]["counts"]) > 0
        assert metric(f"{name}_seconds_sum") == pytest.approx(observed[histogram]["sum"], rel=1e-3, abs=1e-4)
    assert 0 <= metric("kv_cache_hit_rate") <= 1


def test_interfaces_that_change_the_server_are_closed(server):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{server.http_url}/v2/repository/models/ensemble/unload", b"{}")


@pytest.mark.parametrize("main", [http_main, grpc_main])
def test_the_clients(server, offline, capsys, main):
    (expected,) = offline(["hello"], max_tokens=8)
    (ids,) = offline([(1, 2)], max_tokens=8)
    url = ["--url", server.http_url if main is http_main else server.grpc_url]
    for options in ([], ["--stream"]):
        assert main([*url, "--prompt", "hello", "--max-tokens", "8", *options]) == 0
        assert capsys.readouterr().out == expected.text + "\n"
        assert main([*url, "--input-ids", "1,2", "--max-tokens", "8", "--json", *options]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["output_ids"] == list(ids.token_ids)
        assert answer["finish_reason"] == "length"
    assert main([*url, "--prompt", "hello", "--max-tokens", "0"]) == 1
    assert capsys.readouterr().err == "error: max_tokens=0 must be an integer of at least 1\n"


def test_a_client_without_a_server(capsys):
    assert http_main(["--url", "http://127.0.0.1:9", "--prompt", "a"]) == 1
    assert "error: no answer from 127.0.0.1:9" in capsys.readouterr().err
    assert grpc_main(["--url", "127.0.0.1:9", "--prompt", "a"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


# Processes that die


def comes_back(server, offline):
    """Seconds until a request succeeds again."""
    (expected,) = offline([(1, 2, 3)], max_tokens=5)
    start = time.monotonic()

    def answers():
        try:
            answer = http_generate(
                server.http_url, "tensorrt_llm", {"input_ids": [1, 2, 3], "request_output_len": 5}, 5
            )
        except ClientError:
            return False
        return answer["output_ids"] == list(expected.token_ids)

    until(answers, 30)
    return time.monotonic() - start


def victim(server, name):
    processes = server.processes
    if name == "stub":
        return min(triton.stubs(processes.triton))
    return processes.engine.pid if name == "engine" else processes.triton.pid


@pytest.mark.parametrize("name", ["engine", "stub", "tritonserver"])
def test_a_killed_process_ends_the_streams_and_comes_back(server, grpc, offline, name):
    text_fields = {"text_input": "a", "max_tokens": 4000, "stream": True}
    streams = [
        grpc.stream("tensorrt_llm", ENDLESS),
        grpc.stream("ensemble", text_fields),
        http_stream(server.http_url, "tensorrt_llm", ENDLESS),
        http_stream(server.http_url, "ensemble", text_fields),
    ]
    for stream in streams:
        next(stream)
    start = time.monotonic()
    os.kill(victim(server, name), signal.SIGKILL)

    def drain(stream):
        with pytest.raises(ClientError) as caught:
            for _ in stream:
                pass
        return str(caught.value), time.monotonic() - start

    for error, seconds in in_parallel(drain, streams):
        assert seconds < 5, error
        if name == "engine":
            assert "the engine stopped before the request ended" in error
    assert comes_back(server, offline) < 10
    assert server.processes.state.shm_prefix


def test_a_tritonserver_that_is_killed_while_it_starts_comes_back(server, offline):
    for _ in range(2):
        before = server.processes.triton.pid
        os.kill(before, signal.SIGKILL)
        until(lambda before=before: server.processes.triton.pid != before, 10)
    os.kill(server.processes.triton.pid, signal.SIGKILL)
    assert comes_back(server, offline) < 20


def test_while_the_engine_is_away_requests_are_refused_at_once(server, offline):
    os.kill(server.processes.engine.pid, signal.SIGKILL)
    start = time.monotonic()
    errors = []
    while not errors or "not available" not in errors[-1]:
        with pytest.raises(ClientError) as caught:
            http_generate(server.http_url, "tensorrt_llm", {"input_ids": [1], "request_output_len": 1})
        errors.append(str(caught.value))
        assert time.monotonic() < start + 2, errors
    assert comes_back(server, offline) < 20


def test_two_servers_cannot_share_a_folder(server):
    options = ServeOptions(server.processes.options.engine_dir, 0, 0, 0, state_dir=server.processes.state.folder)
    with pytest.raises(ServeError, match="another server uses"):
        Server(options, lambda line: None).start()


SCHEMA = '{"enum": ["ab", 22]}'
EXPRESSION = "[a-c]{3}x"


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_real_engine_serves_32_streams_of_what_it_generates_in_process(family, tmp_path):
    """Half of them with guides, in one batch with the others."""
    folder = engines.tiny_text_engine(family)
    loaded = load_engine(folder)
    starts = {
        "import os": {"guide_type": "json_schema", "guide": SCHEMA},
        "def main():": {},
        "for x in range(10):": {"guide_type": "regex", "guide": EXPRESSION},
        "class A:": {},
    }
    asked = [(f"{start}\n{'# ' * i}", guide) for i in range(8) for start, guide in starts.items()]
    requests = [Request(t, loaded.tokenizer.encode(t), SamplingParams(24, **guide)) for t, guide in asked]
    expected = [result.text for result in loaded.generate(requests)]
    options = ServeOptions(folder, 0, 0, 0, RunOptions(threads=1), state_dir=tmp_path / "state")
    with Server(options, lambda line: None) as real, GrpcClient(real.grpc_url) as client:
        fields = [
            {"text_input": t, "max_tokens": 24, "stream": True}
            | {f"guided_decoding_{name}": value for name, value in guide.items()}
            for t, guide in asked
        ]
        sse = in_parallel(lambda f: text(http_stream(real.http_url, "ensemble", f)), fields)
        streams = in_parallel(lambda f: list(client.stream("ensemble", f)), fields)
    assert sse == expected
    assert [b"".join(o["text_output"][0, 0] for o in stream).decode() for stream in streams] == expected
    assert all(json.loads(answer) in ("ab", 22) for answer in sse[::4])
    assert all(re.fullmatch(EXPRESSION, answer) for answer in sse[2::4])
