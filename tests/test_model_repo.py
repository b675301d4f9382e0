"""What stands between Triton and the engine, without a server: tensors, streams and templates."""

import threading

import numpy as np
import pytest
from google.protobuf import text_format
from null_runner import NullRunner, null_info
from tritonclient.grpc.model_config_pb2 import ModelConfig

from hybridtrt.model_repo.inputs import NO_EFFECT, UNSUPPORTED, Inputs, RequestError
from hybridtrt.model_repo.interface import Ask, Progress, Stop, merge
from hybridtrt.model_repo.repository import CONFIG, MODELS, TEMPLATES, ModelSettings, fill, write_repository
from hybridtrt.model_repo.statistics import PAGES, REQUESTS, SLOTS, samples
from hybridtrt.model_repo.streams import Senders, Stream
from hybridtrt.model_repo.text_interface import TextInterface
from hybridtrt.model_repo.token_interface import TokenInterface
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.protocol import EngineInfo, Reply
from hybridtrt.runtime.request import SamplingParams

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
    monkeypatch.setattr(Inputs, "array", lambda self, name: read.add(name) or None)
    (text_ask if model == "ensemble" else token_ask)()
    declared = {entry.name for entry in config(model).input}
    assert declared <= read
    assert read - set(UNSUPPORTED) - NO_EFFECT - {"stop_words"} <= declared


@pytest.mark.parametrize("model", MODELS)
def test_every_output_is_declared(model):
    ask = Ask(SamplingParams(return_log_probs=True), count_input=model == "ensemble", count_output=model == "ensemble")
    reply = Reply("1", (4,), "x", (-1.0,), "stop", num_prompt_tokens=3)
    assert set(INTERFACES[model].render(ask, reply, Progress())) == {entry.name for entry in config(model).output}


# Requests


def test_a_text_request_is_read():
    ask = text_ask(
        stream=True, temperature=0.5, top_k=3, top_p=0.75, seed=7, end_id=-1, stop_words=["a", "", "é"], pad_id=3,
        return_log_probs=True, return_num_input_tokens=True,
        bad_words="", length_penalty=2.0, beam_width=1, min_tokens=1,
    )  # fmt: skip
    assert ask == Ask(
        SamplingParams(5, 0.5, 3, 0.75, 7, stop_words=("a", "é"), end_id=-1, return_log_probs=True),
        text="hi",
        stream=True,
        count_input=True,
    )
    assert text_ask() == Ask(SamplingParams(5), text="hi")


def test_a_token_request_is_read():
    ask = token_ask(streaming=True, runtime_top_k=3, runtime_top_p=0.5, random_seed=7, exclude_input_in_output=False)
    assert ask == Ask(SamplingParams(5, top_k=3, top_p=0.5, seed=7), input_ids=(1, 2, 3), stream=True, echo=True)
    assert token_ask(input_lengths=2).input_ids == (1, 2)
    assert token_ask(input_ids=[]).input_ids == ()
    assert isinstance(TokenInterface().parse(Inputs(tensors(stop=True))), Stop)


def test_stop_words_list():
    words = np.array([[[5, 9, 0], [1, 2, -1]]], np.int32)
    inputs = tensors(input_ids=[1], request_output_len=1)
    parse = TokenInterface().parse
    assert parse(Inputs(inputs | {"stop_words_list": words})).sampling.stop_token_ids == (5, 9)
    nothing = np.array([[[0], [-1]]], np.int32)
    assert parse(Inputs(inputs | {"stop_words_list": nothing})).sampling.stop_token_ids == ()
    with pytest.raises(RequestError, match="only words of one token"):
        parse(Inputs(inputs | {"stop_words_list": np.array([[[5, 9], [2, -1]]], np.int32)}))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"text_input": b"\xff"}, "text_input is not valid UTF-8: invalid start byte at byte 0"),
        ({"text_input": ["a", "b"]}, r"text_input has shape \[1, 2\], expected one value"),
        ({"messages": "[]"}, "exactly one of text_input and messages is wanted"),
        ({"temperature": float("nan")}, "temperature=nan is not a finite number"),
        ({"seed": 1, "random_seed": 2}, "seed=1 and random_seed=2 contradict each other"),
        ({"beam_width": 4}, "beam_width=4 is not supported, only 1"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 is not supported"),
        ({"bad_words": ["", "x"]}, "bad_words='x' is not supported, only ''"),
        ({"repetition_penalty": 1.5}, "repetition_penalty=1.5 is not supported, only 1.0"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"min_tokens": 3}, "min_tokens=3 is not supported, only 0 or 1"),
        ({"embedding_bias_words": "x"}, "embedding_bias_words='x'"),
        ({"guided_decoding_guide_type": "json"}, "guided_decoding_guide_type='json'"),
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


def test_unknown_parameters_are_refused():
    with pytest.raises(RequestError, match="unknown input 'max_token'"):
        Inputs({}, {"max_token": 5})
    Inputs({}, {"id": "x", "sequence_id": 0, "triton_enable_empty_final_response": True})


# Responses


def test_text_deltas_and_the_echo_come_once():
    interface, progress = TextInterface(), Progress()
    ask = text_ask(exclude_input_in_output=False, return_log_probs=True, return_num_output_tokens=True)
    first = interface.render(ask, Reply("1", (1, 2), "a", (-1.0, -2.0), num_prompt_tokens=2), progress)
    last = interface.render(ask, Reply("1", (3,), "é", (-0.5,), "length"), progress)
    assert [first["text_output"][0, 0], last["text_output"][0, 0]] == [b"hia", "é".encode()]
    assert first["output_log_probs"].shape == (1, 1, 2)
    assert [first["cum_log_probs"][0, 0], last["cum_log_probs"][0, 0]] == [-3.0, -3.5]
    assert last["num_output_tokens"].tolist() == [[3]]
    assert "finish_reason" not in first
    assert last["finish_reason"].tolist() == [[b"length"]]


def test_token_deltas_and_the_echo_come_once():
    interface, progress = TokenInterface(), Progress()
    ask = token_ask(exclude_input_in_output=False)
    first = interface.render(ask, Reply("1", (8,)), progress)
    last = interface.render(ask, Reply("1", (9,), finish_reason="stop"), progress)
    assert first["output_ids"].tolist() == [[[1, 2, 3, 8]]]
    assert first["sequence_length"].tolist() == [[4]]
    assert last["output_ids"].tolist() == [[[9]]]


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


def test_a_client_that_has_gone_is_reported_once():
    responder = FakeResponder()
    stream, _ = stream_of(text_ask(stream=True), responder)
    assert not stream.poll_cancelled()
    responder.gone = True
    assert [stream.poll_cancelled(), stream.poll_cancelled()] == [True, False]


def test_merge_keeps_everything():
    replies = [Reply("1", (1,), "a", (-1.0,), num_prompt_tokens=4), Reply("1", (2,), "b", (-2.0,), "stop")]
    assert merge(replies) == Reply("1", (1, 2), "ab", (-1.0, -2.0), "stop", num_prompt_tokens=4)


def test_metrics_of_a_real_engine():
    engine = Engine(NullRunner(null_info()))
    info = EngineInfo(50, 8, 32, 64, 4, 9)
    values = {(family, label): value for family, label, value in samples(engine.statistics(), info)}
    assert values[REQUESTS, "active"] == 0
    assert values[REQUESTS, "max"] == 8
    assert values[PAGES, "free"] == values[PAGES, "max"] == 128
    assert values[PAGES, "free_full"] == 64
    assert values[SLOTS, "free"] == 8
