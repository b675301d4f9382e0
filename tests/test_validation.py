"""What a request must satisfy: the ranges of TensorRT-LLM and OpenAI, each refusal one line that names the value."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from null_runner import null_info

from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.validation import REQUEST_CHECKS, SAMPLING_CHECKS, check_request

INFO = null_info(vocab_size=50)
SAMPLING_NAMES = {field.name for field in fields(SamplingParams)}
NUMBERS = {"nan": math.nan, "infinite": math.inf, "text": "1", "truth": True, "nothing": None, "too large": 10**400}


def make(**values: Any) -> Request:
    sampling = {name: value for name, value in values.items() if name in SAMPLING_NAMES}
    rest = {name: value for name, value in values.items() if name not in SAMPLING_NAMES}
    return Request("x", (1, 2), SamplingParams(**sampling), **rest)


VALID: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0},
    {"temperature": 9.5, "top_k": 10**6, "top_p": 1, "min_p": 1.0},
    {"temperature": np.float32(0.5), "top_k": np.int32(3), "min_p": np.float64(0.1)},
    {"stop_words": ("a" * 256,) * 64, "bad_words": ("a" * 16,) * 1024, "bad_token_ids": ((1,) * 16,) * 1024},
    {"repetition_penalty": 0.01, "presence_penalty": -100.0, "frequency_penalty": 5},
    {"logit_bias": ((0, -100), (49, 2.5), (3, -1e30)), "bad_token_ids": ((49,), (0, 0, 1)), "bad_words": (" a",)},
    {"n": 64, "seed": 2**64 - 1, "top_log_probs": 20, "prompt_log_probs": 0, "stream_interval": 1000},
    {"max_tokens": 5, "min_tokens": 5},
    {"end_id": -1, "stop_token_ids": (-5, 1000), "stop_words": ("", "a")},
    {"guide_type": "json"},
    {"guide_type": "json", "guide": ""},
    {"guide_type": "regex", "guide": "a+"},
    {"priority": 0, "allotted_time_ms": 1, "cache_salt": ""},
    {"priority": 1.0, "allotted_time_ms": None, "cache_salt": "tenant"},
]

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": -1}, "min_tokens=-1 must be an integer of at least 0"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens=6 exceeds max_tokens=5"),
    ({"min_p": -0.1}, "min_p=-0.1 must be a number in 0..1"),
    ({"min_p": 1.01}, "min_p=1.01 must be a number in 0..1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a number in 1e-06..1e+06"),
    ({"repetition_penalty": -1}, "repetition_penalty=-1 must be a number in 1e-06..1e+06"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty=1e-45 must be a number in 1e-06..1e+06"),
    ({"presence_penalty": -1e308}, "presence_penalty=-1e+308 must be a number in -1e+30..1e+30"),
    ({"frequency_penalty": 1e39}, "frequency_penalty=1e+39 must be a number in -1e+30..1e+30"),
    ({"logit_bias": ((5, 1e39),)}, "logit_bias=((5, 1e+39),) must be pairs"),
    ({"logit_bias": {1: 2.0}}, "logit_bias={1: 2.0} must be pairs of a token id, each once, and a number in -1e+30"),
    ({"logit_bias": ((1, 2.0), (1, 3.0))}, "logit_bias=((1, 2.0), (1, 3.0)) must be pairs of a token id, each once"),
    ({"logit_bias": ((1, math.inf),)}, "logit_bias=((1, inf),) must be pairs"),
    ({"logit_bias": ((1.0, 1),)}, "logit_bias=((1.0, 1),) must be pairs"),
    ({"logit_bias": ((1,),)}, "logit_bias=((1,),) must be pairs"),
    ({"logit_bias": ((50, 1.0),)}, "logit_bias: token id 50 is not in 0..49, the vocabulary"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias: token id -1 is not in 0..49, the vocabulary"),
    (
        {"bad_words": ("a", "")},
        "bad_words=('a', '') must be at most 1024 strings that are not empty, of 16384 characters in all",
    ),
    (
        {"bad_words": "abc"},
        "bad_words='abc' must be at most 1024 strings that are not empty, of 16384 characters in all",
    ),
    (
        {"bad_words": (b"a",)},
        "bad_words=(b'a',) must be at most 1024 strings that are not empty, of 16384 characters in all",
    ),
    (
        {"bad_token_ids": ((),)},
        "bad_token_ids=((),) must be at most 1024 sequences of integers that are not empty, of 16384 in all",
    ),
    (
        {"bad_token_ids": (1, 2)},
        "bad_token_ids=(1, 2) must be at most 1024 sequences of integers that are not empty, of 16384 in all",
    ),
    ({"bad_token_ids": ((1, 50),)}, "bad_token_ids: token id 50 is not in 0..49, the vocabulary"),
    ({"n": 0}, "n=0 must be an integer in 1..64"),
    ({"n": 65}, "n=65 must be an integer in 1..64"),
    ({"beam_width": 4}, "beam_width=4 must be 1: beam search is not supported; n with a temperature gives several"),
    ({"beam_width": 0}, "beam_width=0 must be 1: beam search is not supported"),
    ({"stop_words": ("a",) * 65}, "stop_words=('a', 'a'"),
    ({"stop_words": ("a" * 16385,)}, f"stop_words=('{'a' * 198}... must be at most 64 strings of 16384"),
    ({"bad_words": ("a",) * 1025}, "bad_words=('a', 'a'"),
    ({"bad_token_ids": ((1,) * 16385,)}, "bad_token_ids=((1, 1"),
    ({"stop_words": "END"}, "stop_words='END' must be at most 64 strings of 16384 characters in all"),
    ({"stop_token_ids": 3}, "stop_token_ids=3 must be integers"),
    ({"guide_type": "yaml", "guide": "a"}, "guide_type='yaml' must be one of json, json_schema, regex, ebnf_grammar"),
    ({"guide_type": ["json"]}, "guide_type=['json'] must be one of json"),
    ({"guide_type": "regex"}, "guide_type='regex' needs a guide"),
    ({"guide_type": "json_schema", "guide": ""}, "guide_type='json_schema' needs a guide"),
    ({"guide": "a+"}, "guide needs a guide_type, one of json, json_schema, regex, ebnf_grammar"),
    ({"guide_type": "regex", "guide": 5}, "guide=5 must be a string"),
    ({"top_log_probs": 21}, "top_log_probs=21 must be an integer in 0..20"),
    ({"prompt_log_probs": -1}, "prompt_log_probs=-1 must be an integer in 0..20"),
    ({"stream_interval": 0}, "stream_interval=0 must be an integer of at least 1"),
    ({"priority": 1.5}, "priority=1.5 must be a number in 0..1"),
    ({"cache_salt": "\ud800"}, "cache_salt='\\ud800' must be a string of valid UTF-8"),
    ({"allotted_time_ms": 0}, "allotted_time_ms=0 must be an integer in 1..9223372036854775807"),
    ({"cache_salt": None}, "cache_salt=None must be a string"),
]


@pytest.mark.parametrize("values", VALID)
def test_valid_requests(values: dict[str, Any]) -> None:
    assert check_request(make(**values), INFO).tolist() == [1, 2]


@pytest.mark.parametrize(("values", "message"), INVALID)
def test_invalid_requests_are_refused_with_one_clear_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_request(make(**values), INFO)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_numbers(kind: str) -> None:
    """What is no finite number is none for any field; None is legal where it is the default."""
    value, checks = NUMBERS[kind], SAMPLING_CHECKS | REQUEST_CHECKS
    names = [name for name, (expected, _) in checks.items() if "number" in expected or "an integer" in expected]
    assert len(names) > 15
    for name in names:
        default = getattr(SamplingParams() if name in SAMPLING_NAMES else make(), name)
        unbounded = kind == "too large" and name in ("top_k", "end_id", "stream_interval")
        if not unbounded and (value is not None or default is not None):
            with pytest.raises(ValueError, match=rf"\b{name}="):
                check_request(make(**{name: value}), INFO)
