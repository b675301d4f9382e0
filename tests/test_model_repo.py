"""What stands between Triton and the engine, without a server: tensors, streams and templates."""

import threading
from collections import Counter

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from null_runner import NullRunner, null_info
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig
from tritonclient.utils import triton_to_np_dtype

from hybridtrt.model_repo.inputs import NO_EFFECT, UNSUPPORTED, Inputs, RequestError
from hybridtrt.model_repo.interface import Ask, Progress, Stop, merge
from hybridtrt.model_repo.metrics import Metrics
from hybridtrt.model_repo.repository import CONFIG, MODELS, TEMPLATES, ModelSettings, fill, write_repository
from hybridtrt.model_repo.statistics import HISTOGRAMS
from hybridtrt.model_repo.streams import Senders, Stream
from hybridtrt.model_repo.text_interface import TextInterface
from hybridtrt.model_repo.token_interface import TokenInterface
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.protocol import EngineInfo, Reply
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.statistics import Histogram, Recorder
from hybridtrt.runtime.submission import Submission

INTERFACES = {"ensemble": TextInterface(), "tensorrt_llm": TokenInterface()}
SETTINGS = ModelSettings('/tmp/a "quoted" \\path/engine.sock')


def tensors(**values):
    """Values as Triton hands them on: with a batch dimension, strings as bytes."""
    made = {}
    for name, value in values.items():
        value = value if isinstance(value, list) else [value]
        strings = [v.encode() if isinstance(v, str) else v for v in value]
        made[name] = (
            np.array([strings], np.object_ if isinstance(strings[0], bytes) else None)
            if value
            else np.empty((1, 0), np.int32)
        )
    return made


def text_ask(**values):
    return TextInterface().parse(Inputs(tensors(**{"text_input": "hi", "max_tokens": 5} | values)))


def token_ask(**values):
    return TokenInterface().parse(Inputs(tensors(**{"input_ids": [1, 2, 3], "request_output_len": 5} | values)))


def config(model):
    """The filled-in configuration of a model, through protobuf's own parser."""
    text = (TEMPLATES / model / CONFIG).read_text()
    return text_format.Parse(fill(text, SETTINGS, model), ModelConfig())


# Templates


@pytest.mark.parametrize("model", MODELS)
def test_templates_are_filled_in(tmp_path, model):
    write_repository(tmp_path, SETTINGS)
    write_repository(tmp_path, SETTINGS)
    text = (tmp_path / model / CONFIG).read_text()
    assert "${" not in text
    parsed = text_format.Parse(text, ModelConfig())
    assert parsed.name == model
    assert parsed.model_transaction_policy.decoupled
    assert parsed.parameters["engine_socket"].string_value == SETTINGS.engine_socket
    assert (tmp_path / model / "1/model.py").is_file()


def test_an_unknown_key_is_named():
    with pytest.raises(ValueError, match=r"x has an unknown key 'nonsense'; known: engine_socket"):
        fill("a: ${nonsense}", SETTINGS, "x")


@pytest.mark.parametrize("model", MODELS)
def test_every_declared_input_is_read_refused_or_known_to_have_no_effect(model, monkeypatch):
    read = set(NO_EFFECT)
    single, values = Inputs._single, Inputs._values
    monkeypatch.setattr(Inputs, "_single", lambda self, name: read.add(name) or single(self, name))
    monkeypatch.setattr(Inputs, "_values", lambda self, name: read.add(name) or values(self, name))
    (text_ask if model == "ensemble" else token_ask)()
    declared = {entry.name for entry in config(model).input}
    assert declared <= read
    assert read - set(UNSUPPORTED) - NO_EFFECT <= declared


def dtype_of(entry):
    name = DataType.Name(entry.data_type).removeprefix("TYPE_")
    return triton_to_np_dtype("BYTES" if name == "STRING" else name)


@pytest.mark.parametrize("model", MODELS)
def test_every_output_is_declared_with_its_shape(model):
    """Two answers of different lengths, with all that can be asked for."""
    params = SamplingParams(n=2, return_log_probs=True, top_log_probs=2, prompt_log_probs=2)
    counted = model == "ensemble"
    ask = Ask(Submission("", input_ids=(1, 2), sampling=params), count_input=counted, count_output=counted)
    top = ((4, -1.0), (5, -2.0))
    replies = [
        Reply("1", (4,), "x", (-1.0,), "stop", None, 0, True, (top,), ((-3.0, top),), num_prompt_tokens=2),
        Reply("1", (4, 5), "xy", (-1.0, -2.0), "length", None, 1, False, (top, top)),
    ]
    tensors = INTERFACES[model].render(ask, replies, Progress())
    declared = {entry.name: entry for entry in config(model).output}
    assert set(tensors) == set(declared)
    for name, tensor in tensors.items():
        assert dtype_of(declared[name]) == tensor.dtype
        assert len(tensor.shape) == 1 + len(declared[name].dims)
        assert all(dim in (-1, size) for dim, size in zip(declared[name].dims, tensor.shape[1:], strict=True))


# Requests


def test_a_text_request_is_read():
    ask = text_ask(
        stream=True, temperature=0.5, top_k=3, top_p=0.75, seed=7, end_id=-1, stop_words=["a", "", "é"], pad_id=3,
        return_log_probs=True, return_num_input_tokens=True,
        bad_words=["", "b"], length_penalty=2.0, beam_width=1, min_tokens=1, num_return_sequences=2, min_p=0.25,
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, top_log_probs=2, prompt_log_probs=0,
        guided_decoding_guide_type="regex", guided_decoding_guide="a+", stream_interval=4,
        embedding_bias_words=["", "yes"], embedding_bias_weights=[1.0, 2.0],
        priority=0.75, allotted_time_ms=100, cache_salt="tenant",
    )  # fmt: skip
    params = SamplingParams(
        5, 1, 0.5, 3, 0.75, 0.25, 1.5, 0.5, -0.5, bad_words=("b",), seed=7, n=2, stop_words=("a", "é"), end_id=-1,
        guide_type="regex", guide="a+", return_log_probs=True, top_log_probs=2, prompt_log_probs=0, stream_interval=4,
    )  # fmt: skip
    more = {"priority": 0.75, "allotted_time_ms": 100, "cache_salt": "tenant"}
    submission = Submission("", "hi", sampling=params, logit_bias_words=(("yes", 2.0),), **more)
    assert ask == Ask(submission, stream=True, count_input=True)
    off = {"bad_words": "", "guided_decoding_guide_type": "", "guided_decoding_guide": ""}
    off |= {"embedding_bias_words": "", "embedding_bias_weights": 0.0}
    assert text_ask() == text_ask(**off) == Ask(Submission("", "hi", sampling=SamplingParams(5, stream_interval=5)))


def test_a_token_request_is_read():
    ask = token_ask(streaming=True, runtime_top_k=3, runtime_top_p=0.5, random_seed=7, exclude_input_in_output=False)
    params = SamplingParams(5, top_k=3, top_p=0.5, seed=7)
    assert ask == Ask(Submission("", input_ids=(1, 2, 3), sampling=params), stream=True, echo=True)
    assert token_ask(input_lengths=2).submission.input_ids == (1, 2)
    assert token_ask(input_ids=[]).submission.input_ids == ()
    assert token_ask(embedding_bias=[0.0, 1.5, 0.0, -2.0]).sampling.logit_bias == ((1, 1.5), (3, -2.0))
    assert isinstance(TokenInterface().parse(Inputs(tensors(stop=True))), Stop)


def word_lists(**lists):
    """A request with words as TensorRT-LLM lays them out."""
    arrays = {name: np.array([value], np.int32) for name, value in lists.items()}
    return TokenInterface().parse(Inputs(tensors(input_ids=[1], request_output_len=1) | arrays)).sampling


def test_lists_of_words():
    params = word_lists(stop_words_list=[[5, 9, 0], [1, 2, -1]], bad_words_list=[[5, 9, 7], [2, 3, -1]])
    assert (params.stop_token_ids, params.bad_token_ids) == ((5, 9), ((5, 9), (7,)))
    nothing = word_lists(stop_words_list=[[0], [-1]], bad_words_list=[[0], [-1]])
    assert (nothing.stop_token_ids, nothing.bad_token_ids) == ((), ())
    with pytest.raises(RequestError, match="only words of one token"):
        word_lists(stop_words_list=[[5, 9], [2, -1]])
    for ends in ([3, -1], [2, 1], [1, 1]):
        with pytest.raises(RequestError, match=r"bad_words_list has words that end at .* at most 2"):
            word_lists(bad_words_list=[[5, 9], ends])


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"text_input": b"\xff"}, "text_input is not valid UTF-8: invalid start byte at byte 0"),
        ({"text_input": ["a", "b"]}, r"text_input has shape \[1, 2\], expected one value"),
        ({"messages": "[]"}, "exactly one of text_input and messages is wanted"),
        ({"temperature": float("nan")}, "temperature=nan is not a finite number"),
        ({"seed": 1, "random_seed": 2}, "seed=1 and random_seed=2 contradict each other"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf is not a finite number"),
        ({"embedding_bias_words": "x"}, "embedding_bias_words are 1 and embedding_bias_weights 0"),
        (
            {"embedding_bias_words": "x", "embedding_bias_weights": float("nan")},
            "embedding_bias_weights has a value that is not a finite number",
        ),
        ({"lora_task_id": 0}, "lora_task_id=0 is not supported, only leaving it out"),
        ({"return_context_logits": True}, "return_context_logits=True is not supported, only False"),
        ({"prompt_embedding_table": [0.5]}, "prompt_embedding_table=0.5"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(values, error):
    with pytest.raises(RequestError, match=error):
        text_ask(**values)


def test_what_is_missing_is_named():
    with pytest.raises(RequestError, match="max_tokens is missing"):
        TextInterface().parse(Inputs(tensors(text_input="a")))
    with pytest.raises(RequestError, match="exactly one of text_input and messages"):
        TextInterface().parse(Inputs(tensors(max_tokens=1)))
    with pytest.raises(RequestError, match="input_ids is missing"):
        TokenInterface().parse(Inputs(tensors(request_output_len=1)))
    with pytest.raises(RequestError, match="input_lengths=4 does not fit input_ids of 3 tokens"):
        token_ask(input_lengths=4)


@pytest.mark.parametrize("count", [3, 383, 385])
def test_biases_are_as_many_as_the_vocabulary_has_tokens(count):
    arrays = {"input_ids": np.ones((1, 1), np.int32), "request_output_len": np.ones((1, 1), np.int32)}
    given = arrays | {"embedding_bias": np.zeros((1, count), np.float32)}
    with pytest.raises(RequestError, match=f"embedding_bias has {count} numbers, expected 384: one for each token"):
        TokenInterface().parse(Inputs(given, vocab_size=384))


@pytest.mark.parametrize("interval", [0, -1])
def test_a_stream_interval_is_handed_on_without_a_stream_too(interval):
    assert text_ask(stream_interval=interval).submission.sampling.stream_interval == interval
    assert text_ask(stream_interval=3).submission.sampling.stream_interval == 5  # max_tokens: all at once


def test_unknown_parameters_are_refused():
    with pytest.raises(RequestError, match="unknown input 'max_token'"):
        Inputs({}, {"max_token": 5})
    Inputs({}, {"id": "x", "sequence_id": 0, "triton_enable_empty_final_response": True})


def test_the_timeout_of_a_request_is_its_allotted_time():
    """Triton's clients give it in microseconds, with 0 for none; the input of our own goes before it."""
    inputs = tensors(text_input="a", max_tokens=1)
    own = tensors(allotted_time_ms=7)
    for timeout, more, expected in ((0, {}, None), (1500, {}, 2), (1500, own, 7)):
        ask = TextInterface().parse(Inputs(inputs | more, {"timeout": timeout}))
        assert ask.submission.allotted_time_ms == expected
    for timeout in (-1, 0.5, "soon"):
        with pytest.raises(RequestError, match=f"timeout={timeout!r} is not a number of microseconds"):
            TextInterface().parse(Inputs(inputs, {"timeout": timeout}))


# Responses


def test_text_deltas_and_the_echo_come_once():
    interface, progress = TextInterface(), Progress()
    ask = text_ask(exclude_input_in_output=False, return_log_probs=True, return_num_output_tokens=True)
    first = interface.render(ask, [Reply("1", (1, 2), "a", (-1.0, -2.0), num_prompt_tokens=2)], progress)
    last = interface.render(ask, [Reply("1", (3,), "é", (-0.5,), "length")], progress)
    assert [first["text_output"][0, 0], last["text_output"][0, 0]] == [b"hia", "é".encode()]
    assert first["output_log_probs"].shape == (1, 1, 2)
    assert [first["cum_log_probs"][0, 0], last["cum_log_probs"][0, 0]] == [-3.0, -3.5]
    assert last["num_output_tokens"].tolist() == [[3]]
    assert "finish_reason" not in first
    assert last["finish_reason"].tolist() == [[b"length"]]


def test_token_deltas_and_the_echo_come_once():
    interface, progress = TokenInterface(), Progress()
    ask = token_ask(exclude_input_in_output=False)
    first = interface.render(ask, [Reply("1", (8,))], progress)
    last = interface.render(ask, [Reply("1", (9,), finish_reason="stop")], progress)
    assert first["output_ids"].tolist() == [[[1, 2, 3, 8]]]
    assert first["sequence_length"].tolist() == [[4]]
    assert last["output_ids"].tolist() == [[[9]]]


def test_answers_of_different_lengths_are_rows_of_one_response():
    ask = token_ask(exclude_input_in_output=False, num_return_sequences=2, return_log_probs=True)
    replies = [Reply("1", (8,), "", (-0.5,), "stop"), Reply("1", (7, 9), "", (-1.0, -2.0), "length", index=1)]
    tensors = TokenInterface().render(ask, replies, Progress())
    assert tensors["output_ids"].tolist() == [[[1, 2, 3, 8, -1], [1, 2, 3, 7, 9]]]
    assert tensors["sequence_length"].tolist() == [[4, 5]]
    assert tensors["sequence_index"].tolist() == [[0, 1]]
    assert tensors["finish_reason"].tolist() == [[b"stop", b"length"]]
    assert tensors["output_log_probs"].tolist() == [[[-0.5, 0], [-1.0, -2.0]]]
    assert tensors["cum_log_probs"].tolist() == [[-0.5, -3.0]]


class FakeResponder:
    def __init__(self):
        self.sent = []
        self.gone = False
        self.broken = False
        self.hold = threading.Event()
        self.hold.set()

    def send(self, tensors, final):
        self.hold.wait(5)
        if self.broken:
            raise OSError("shared memory is full")
        self.sent.append((tensors, final))

    def fail(self, error, code):
        self.sent.append((f"{code}: {error}", True))

    def is_cancelled(self):
        return self.gone


def stream_of(ask, responder, interface=None):
    ended = []
    stream = Stream(interface or TextInterface(), ask, responder, "1", ended.append)
    return stream, ended


def texts(responder):
    return [sent if isinstance(sent, str) else sent["text_output"][0, 0].decode() for sent, _ in responder.sent]


def finals(responder):
    return [final for _, final in responder.sent]


def test_replies_that_pile_up_go_out_as_one_response_in_order():
    responder = FakeResponder()
    stream, ended = stream_of(text_ask(stream=True), responder)
    senders = Senders(2)
    take = senders.attach(stream)
    responder.hold.clear()
    for i in range(100):
        take(Reply("1", (i,), f"{i},", finish_reason="length" if i == 99 else None))
    responder.hold.set()
    senders.close()
    assert "".join(texts(responder)) == "".join(f"{i}," for i in range(100))
    assert len(responder.sent) <= 3
    assert finals(responder) == [False] * (len(responder.sent) - 1) + [True]
    assert ended == [stream]


def test_without_stream_there_is_one_response():
    responder = FakeResponder()
    stream, _ = stream_of(text_ask(), responder)
    assert [stream.add(Reply("1", (i,), f"{i}", finish_reason=r)) for i, r in enumerate((None, None, "stop"))] == [
        False,
        False,
        True,
    ]
    stream.send()
    assert (texts(responder), finals(responder)) == (["012"], [True])


def test_text_that_is_held_back_sends_nothing_and_loses_nothing():
    responder = FakeResponder()
    stream, _ = stream_of(text_ask(stream=True, return_log_probs=True), responder)
    for reply in (
        Reply("1", (1,), "", (-1.0,)),
        Reply("1", (2,), "ab", (-2.0,)),
        Reply("1", (3,), "", (-3.0,), "stop"),
    ):
        stream.add(reply)
        stream.send()
    assert texts(responder) == ["ab", ""]
    assert responder.sent[0][0]["output_log_probs"].tolist() == [[[-1.0, -2.0]]]


@pytest.mark.parametrize("gap", [1, 2, 3, 100])
def test_several_answers(gap):
    """A stream's responses are of one answer each, and only the last one is final; otherwise there is one response."""
    replies = [
        Reply("1", (1,), "a", index=0),
        Reply("1", (2,), "b", index=1),
        Reply("1", (3,), "", index=0),
        Reply("1", (4,), "d", finish_reason="stop", index=1, more=True),
        Reply("1", (5,), "e", finish_reason="length", index=0),
    ]
    received = {}
    for streamed in (True, False):
        responder = FakeResponder()
        stream, ended = stream_of(text_ask(stream=streamed, num_return_sequences=2), responder)
        for i, reply in enumerate(replies):
            waits = stream.add(reply)
            if (i % gap == 0 and waits) or i == len(replies) - 1:
                stream.send()
        assert finals(responder) == [False] * (len(responder.sent) - 1) + [True]
        assert (len(ended), stream.finish_reason) == (1, "length")
        received[streamed] = {0: b"", 1: b""}
        for sent, _ in responder.sent:
            for index, piece in zip(sent["sequence_index"][0], sent["text_output"][0], strict=True):
                received[streamed][index] += piece
            assert not streamed or len(sent["sequence_index"][0]) == 1
    assert received[True] == received[False] == {0: b"ae", 1: b"bd"}
    assert responder.sent[0][0]["finish_reason"].tolist() == [[b"length", b"stop"]]


def test_an_error_ends_a_stream_once():
    responder = FakeResponder()
    stream, ended = stream_of(text_ask(stream=True), responder)
    for reply in (
        Reply("1", (1,), "a"),
        Reply("1", finish_reason="error", error="boom", code="unavailable"),
        Reply("1", (2,), "b"),
    ):
        stream.add(reply)
        stream.send()
    assert (texts(responder), finals(responder)) == (["a", "unavailable: boom"], [False, True])
    assert (len(ended), stream.finish_reason) == (1, "error")


def test_a_response_that_cannot_be_sent_ends_the_stream():
    responder = FakeResponder()
    responder.broken = True
    stream, ended = stream_of(text_ask(stream=True), responder)
    stream.add(Reply("1", (1,), "a"))
    stream.send()
    assert texts(responder) == ["internal: the response could not be sent: shared memory is full"]
    assert ended == [stream]


def test_a_sender_outlives_an_error_that_cannot_be_sent():
    responder = FakeResponder()
    responder.fail = responder.send = None
    stream, ended = stream_of(text_ask(stream=True), responder)
    stream.add(Reply("1", (1,), "a"))
    stream.send()
    assert (ended, stream.finish_reason) == ([stream], "error")


def test_a_client_that_has_gone_is_reported_once():
    responder = FakeResponder()
    stream, _ = stream_of(text_ask(stream=True), responder)
    assert not stream.poll_cancelled()
    responder.gone = True
    assert [stream.poll_cancelled(), stream.poll_cancelled()] == [True, False]


def test_merge_keeps_everything():
    """Each field of either reply, in order; what only one of them has, and of the rest the last."""
    one = Reply("1", (1,), "a", (-1.0,), None, None, 3, True, (((1, -1.0),),), ((-0.5, ()),), None, 4)
    two = Reply("1", (2,), "b", (-2.0,), "stop", "e", 3, False, (((2, -2.0),),), ((-0.25, ()),), "internal")
    top, prompt = (((1, -1.0),), ((2, -2.0),)), ((-0.5, ()), (-0.25, ()))
    expected = Reply("1", (1, 2), "ab", (-1.0, -2.0), "stop", "e", 3, False, top, prompt, "internal", 4)
    assert merge([one, two]) == expected


# Metrics


class FakeFamilies:
    """Triton's `MetricFamily`; keeps all that is written, by name and labels."""

    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

    def __init__(self):
        self.written = {}

    def __call__(self, name, description, kind):
        return FakeFamily(self.written, name, kind)


class FakeFamily:
    def __init__(self, written, name, kind):
        self.written, self.name, self.kind = written, name, kind

    def Metric(self, labels, **options):  # noqa: N802
        assert (self.kind == "histogram") == ("buckets" in options)
        own = [value for name, value in labels.items() if name not in ("model", "version")]
        return FakeMetric(self.written, (self.name, *own))


class FakeMetric:
    def __init__(self, written, key):
        self.written, self.key = written, key

    def set(self, value):
        self.written[self.key] = value

    def increment(self, value):
        assert value > 0
        self.written[self.key] = self.written.get(self.key, 0) + value

    def observe(self, value):
        self.written.setdefault(self.key, []).append(value)


class FakeClient:
    info = EngineInfo(50, 8, 32, 64, 4, 9)

    def __init__(self, engine):
        self.engine = engine

    def statistics(self):
        return self.engine.statistics()


def test_metrics_of_a_real_engine():
    engine = Engine(NullRunner(null_info()))
    families = FakeFamilies()
    answered = Counter({"stop": 2})
    metrics = Metrics(families, {"model": "m", "version": "1"}, FakeClient(engine), answered, engine=True)
    metrics.update()
    engine.generate([Request("a", (1, 2, 3), SamplingParams(4))])
    answered["stop"] += 1
    metrics.update()
    metrics.update()
    written = families.written
    assert written["nv_trt_llm_request_metrics", "active"] == 0
    assert written["nv_trt_llm_request_metrics", "max"] == 8
    pages = {kind: written["nv_trt_llm_kv_cache_block_metrics", kind] for kind in ("used", "cached", "free", "max")}
    assert pages["used"] + pages["cached"] + pages["free"] == pages["max"] == 128
    assert written["nv_trt_llm_kv_cache_block_metrics", "free_full"] <= 64
    assert written["nv_trt_llm_state_slot_metrics", "max"] == 8
    assert written["nv_trt_llm_token_metrics", "sampled"] == 4
    assert written["nv_trt_llm_response_metrics", "stop"] == 3
    for name in ("request_queue_time", "time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert len(written[f"trtllm_{name}_seconds",]) == 1
    assert written["trtllm_kv_cache_hit_rate",] == engine.statistics()["hit_rate"]


@given(st.lists(st.floats(0, 2000)), st.lists(st.floats(0, 2000)))
def test_observations_keep_buckets_and_sum(before, after):
    """Whatever the engine observed, in two polls and before a restart: Triton's histogram has its buckets and sum."""
    recorder = Recorder(lambda: 0.0)
    families = FakeFamilies()
    metrics = Metrics(families, {}, None, Counter(), engine=True)
    expected = Histogram()
    for values in (before, after):
        for value in values:
            recorder.histograms["queue"].observe(value)
            expected.observe(value)
        queue = recorder.histograms["queue"]
        metrics._observe("queue", list(queue.counts), queue.sum)
    if sum(before) + sum(after):
        metrics._observe("queue", [0] * len(queue.counts), 0.0)
    observed = Histogram()
    for value in families.written.get((HISTOGRAMS["queue"].name,), ()):
        observed.observe(value)
    assert observed.counts == expected.counts
    assert observed.sum == pytest.approx(expected.sum, rel=1e-6, abs=1e-2)
