"""What a request must satisfy before it is queued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import RunnerInfo

MAX_SEED = 2**64 - 1
MAX_ANSWERS = 64
MAX_TIME_MS = 2**63 - 1
MAX_STOP_WORDS = 64  # each costs every character of the answer a look
MAX_BAD_WORDS = 1024
MAX_WORDS = 16384  # characters or tokens of all words of one kind
MAX_SHOWN = 200  # characters of a wrong value in its message
MAX_TOP_LOG_PROBS = 20  # of OpenAI's interface
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")  # TensorRT-LLM's

Test = Callable[[Any], bool]
Check = tuple[str, Test]  # what a value must be, and whether it is


def check_request(request: Request, info: RunnerInfo) -> NDArray[np.int32]:
    """The prompt of a valid request, `[N]`. Raises `ValueError`, one line, for the first thing that is wrong."""
    prompt = _prompt(request, info.vocab_size)
    params = request.params
    _check_fields(params, SAMPLING_CHECKS)
    _check_fields(request, REQUEST_CHECKS)
    _check_together(params)
    for token in (token for token, _ in params.logit_bias):
        _check_token(token, info.vocab_size, "logit_bias: ")
    for token in (token for word in params.bad_token_ids for token in word):
        _check_token(token, info.vocab_size, "bad_token_ids: ")
    if len(prompt) + params.max_tokens > info.max_seq_len:
        raise ValueError(
            f"prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed max_seq_len={info.max_seq_len}"
        )
    return prompt


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end a request: the model's own or `end_id` in their place, and the request's further ones."""
    ends = eos_token_ids if params.end_id is None else (params.end_id,)
    return frozenset(() if params.ignore_eos else ends).union(params.stop_token_ids)


def _prompt(request: Request, vocab_size: int) -> NDArray[np.int32]:
    ids = request.prompt_ids
    if len(ids) == 0:
        raise ValueError("the prompt is empty")
    if not all(_is_integer(token) for token in ids):
        raise ValueError("the prompt must be a flat list of integer token ids")
    for token in (min(ids), max(ids)):
        _check_token(token, vocab_size)
    return np.array(ids, np.int32)


def _check_token(token: int, vocab_size: int, where: str = "") -> None:
    if not 0 <= token < vocab_size:
        raise ValueError(f"{where}token id {token} is not in 0..{vocab_size - 1}, the vocabulary")


def _check_fields(subject: object, checks: Mapping[str, Check]) -> None:
    for name, (expected, holds) in checks.items():
        value = getattr(subject, name)
        if not holds(value):
            shown = repr(value)
            shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
            raise ValueError(f"{name}={shown} must be {expected}")


def _check_together(params: SamplingParams) -> None:
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens} exceeds max_tokens={params.max_tokens}")
    if params.guide_type is None and params.guide is not None:
        raise ValueError(f"guide needs a guide_type, one of {', '.join(GUIDE_TYPES)}")
    if params.guide_type not in (None, "json") and not params.guide:
        raise ValueError(f"guide_type={params.guide_type!r} needs a guide")


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    largest = sys.float_info.max
    return (_is_integer(value) or isinstance(value, (float, np.floating))) and bool(-largest <= value <= largest)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_list(value: object, holds: Test) -> bool:
    return isinstance(value, (tuple, list)) and all(holds(item) for item in value)


def _are_words(value: Any, most: int, holds: Test) -> bool:
    return _is_list(value, holds) and len(value) <= most and sum(map(len, value)) <= MAX_WORDS


def _is_bias(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and _is_integer(value[0]) and ADDED[1](value[1])


def _integer(low: int, high: int | None = None, note: str = "") -> Check:
    expected = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"
    return expected + note, lambda value: _is_integer(value) and low <= value and (high is None or value <= high)


def _number(low: float, high: float) -> Check:
    return f"a number in {low:g}..{high:g}", lambda value: _is_number(value) and low <= value <= high


def _optional(check: Check) -> Check:
    expected, holds = check
    return expected, lambda value: value is None or holds(value)


MOST_ADDED = 1e30  # to a logit: much more would leave the numbers of float32
MOST_FACTOR = 1e6
ADDED: Check = _number(-MOST_ADDED, MOST_ADDED)

SAMPLING_CHECKS: dict[str, Check] = {
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "temperature": _optional(("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)),
    "top_k": _optional(_integer(0, note=" (0: no limit)")),
    "top_p": _optional(_number(0, 1)),
    "min_p": _optional(_number(0, 1)),
    "repetition_penalty": _number(1 / MOST_FACTOR, MOST_FACTOR),
    "presence_penalty": ADDED,
    "frequency_penalty": ADDED,
    "logit_bias": (
        f"pairs of a token id, each once, and {ADDED[0]}",
        lambda value: _is_list(value, _is_bias) and len({token for token, _ in value}) == len(value),
    ),
    "bad_words": (
        f"at most {MAX_BAD_WORDS} strings that are not empty, of {MAX_WORDS} characters in all",
        lambda value: _are_words(value, MAX_BAD_WORDS, lambda word: isinstance(word, str) and word != ""),
    ),
    "bad_token_ids": (
        f"at most {MAX_BAD_WORDS} sequences of integers that are not empty, of {MAX_WORDS} in all",
        lambda value: _are_words(value, MAX_BAD_WORDS, lambda word: _is_list(word, _is_integer) and len(word) > 0),
    ),
    "seed": _optional(_integer(0, MAX_SEED)),
    "n": _integer(1, MAX_ANSWERS),
    "beam_width": (
        "1: beam search is not supported; n with a temperature gives several answers",
        lambda value: _is_integer(value) and value == 1,
    ),
    "stop_token_ids": ("integers", lambda value: _is_list(value, _is_integer)),
    "stop_words": (
        f"at most {MAX_STOP_WORDS} strings of {MAX_WORDS} characters in all",
        lambda value: _are_words(value, MAX_STOP_WORDS, lambda word: isinstance(word, str)),
    ),
    "end_id": ("an integer (negative: never end)", lambda value: value is None or _is_integer(value)),
    "guide_type": (f"one of {', '.join(GUIDE_TYPES)}", lambda value: value is None or value in GUIDE_TYPES),
    "guide": ("a string", lambda value: value is None or isinstance(value, str)),
    "top_log_probs": _integer(0, MAX_TOP_LOG_PROBS),
    "prompt_log_probs": _optional(_integer(0, MAX_TOP_LOG_PROBS)),
    "stream_interval": _integer(1),
}

REQUEST_CHECKS: dict[str, Check] = {
    "priority": _number(0, 1),
    "allotted_time_ms": _optional(_integer(1, MAX_TIME_MS)),
    "cache_salt": ("a string of valid UTF-8", lambda value: isinstance(value, str) and _is_utf8(value)),
}
