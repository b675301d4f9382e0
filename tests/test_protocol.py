"""Frames of the engine's socket: what is sent arrives, and what is malformed is refused with one line."""

import json
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrt.runtime import protocol
from hybridtrt.runtime.protocol import EngineInfo, FrameDecoder, ProtocolError, Reply
from hybridtrt.runtime.request import SamplingParams
from hybridtrt.runtime.submission import Submission

INFO = EngineInfo(100, 8, 256, 512, 32, 9, {"full": 64}, has_tokenizer=True)


st.register_type_strategy(float, st.floats(allow_nan=False))  # in these tests values are compared


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def through_wire(message):
    (received,) = FrameDecoder().feed(protocol.encode(message))
    return received


def test_messages_survive_any_cut():
    messages = [{"type": "cancel", "id": "é" * n} for n in range(20)]
    data = b"".join(map(protocol.encode, messages))
    for size in (1, 2, 3, 5, 7, len(data)):
        decoder = FrameDecoder()
        received = [m for i in range(0, len(data), size) for m in decoder.feed(data[i : i + size])]
        assert received == messages


def test_hello_carries_the_engine():
    assert protocol.parse_hello(through_wire(protocol.hello(INFO))) == INFO


@given(st.data())
def test_any_submission_survives(data):
    prompt = data.draw(st.sampled_from(({"text": "x\n"}, {"messages": "[]"}, {"input_ids": (1, 2)}, {"input_ids": ()})))
    sampling = data.draw(st.from_type(SamplingParams))
    submission = replace(data.draw(st.from_type(Submission)), text=None, messages=None, input_ids=None)
    submission = replace(submission, sampling=sampling, **prompt)
    assert protocol.parse_submit(through_wire(protocol.submit(submission))) == submission


def test_temperature_may_be_an_integer_in_json():
    message = {"type": "submit", "id": "1", "text": "a", "sampling": {"temperature": 1}}
    assert protocol.parse_submit(message).sampling.temperature == 1


@given(st.from_type(Reply))
def test_any_reply_survives(reply):
    assert protocol.parse_reply(through_wire({"type": "reply", "reply": protocol.reply(reply)})["reply"]) == reply


def test_only_what_differs_from_the_defaults_crosses():
    assert protocol.reply(Reply("7")) == {"request_id": "7"}
    assert protocol.parse_reply({"request_id": "7"}) == Reply("7")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not JSON"),
        (b"nonsense", "not JSON"),
        (b'"\xff"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "'type'"),
        (b'{"type": 3}', "'type'"),
    ],
)
def test_malformed_frames_are_refused(body, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        list(FrameDecoder().feed(frame(body)))


def test_a_huge_frame_is_refused_before_it_is_received():
    with pytest.raises(ProtocolError, match="larger than 1000"):
        list(FrameDecoder(1000).feed(struct.pack(">I", 1001)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"id": 5}, "submit.id is 5, expected str"),
        ({"input_ids": "abc"}, "submit.input_ids"),
        ({"input_ids": [1, 2.5]}, "expected a list of int"),
        ({"input_ids": [1, True]}, "expected a list of int"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"text": "also"}, "exactly one of"),
        ({"sampling": 3}, "submit.sampling is 3"),
        ({"sampling": {"max_token": 3}}, "unknown field 'max_token'"),
        ({"sampling": {"max_tokens": "3"}}, "submit.sampling.max_tokens is '3', expected int"),
        ({"sampling": {"max_tokens": True}}, "submit.sampling.max_tokens is True, expected int"),
        ({"sampling": {"max_tokens": 1.5}}, "submit.sampling.max_tokens is 1.5"),
        ({"sampling": {"temperature": "hot"}}, "expected float"),
        ({"sampling": {"stop_words": "x"}}, "submit.sampling.stop_words is 'x', expected a list"),
        ({"sampling": {"stop_words": [1]}}, "expected a list of str"),
        ({"sampling": {"logit_bias": [[1, 0.5], [2]]}}, r"logit_bias\[1\] is \[2\], expected a list of 2"),
        ({"sampling": {"logit_bias": [["1", 0.5]]}}, r"logit_bias\[0\]\[0\] is '1', expected int"),
        ({"sampling": {"bad_token_ids": [[1], 2]}}, r"bad_token_ids\[1\] is 2, expected a list"),
        ({"logit_bias_words": [["a", "b"]]}, r"logit_bias_words\[0\]\[1\] is 'b', expected float"),
        ({"sampling": {"return_log_probs": 1}}, "expected bool"),
    ],
)
def test_malformed_submissions_name_the_field(change, complaint):
    message = {"type": "submit", "id": "1", "input_ids": [1]} | change
    with pytest.raises(ProtocolError, match=complaint):
        protocol.parse_submit(json.loads(json.dumps(message)))


def test_a_missing_id_is_named():
    with pytest.raises(ProtocolError, match="'id'"):
        protocol.parse_submit({"type": "submit", "text": "a"})


def test_another_protocol_version_is_refused():
    with pytest.raises(ProtocolError, match="expected 'hello' of protocol 2, got 'hello' of protocol 3"):
        protocol.parse_hello(protocol.hello(INFO) | {"protocol": 3})


def test_long_values_are_cut_in_errors():
    with pytest.raises(ProtocolError) as caught:
        protocol.parse_submit({"type": "submit", "id": "1", "input_ids": ["x"] * 10_000})
    assert len(str(caught.value)) < 200
