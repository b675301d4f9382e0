"""What a request must satisfy before it is queued."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import RunnerInfo

MAX_SEED = 2**64 - 1


def check_request(request: Request, info: RunnerInfo) -> NDArray[np.int32]:
    """The prompt of a valid request, `[N]`. Raises `ValueError`, one line, for the first thing that is wrong."""
    prompt = _prompt(request, info.vocab_size)
    params = request.params
    _check_sampling(params)
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
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is not in 0..{vocab_size - 1}, the vocabulary")
    return np.array(ids, np.int32)


def _check_sampling(params: SamplingParams) -> None:
    if not _is_integer(params.max_tokens) or params.max_tokens < 1:
        raise ValueError(f"max_tokens={params.max_tokens!r} must be an integer of at least 1")
    if params.temperature is not None and not (_is_number(params.temperature) and params.temperature >= 0):
        raise ValueError(f"temperature={params.temperature!r} must be a finite number of at least 0")
    if params.top_k is not None and not (_is_integer(params.top_k) and params.top_k >= 0):
        raise ValueError(f"top_k={params.top_k!r} must be an integer of at least 0 (0: no limit)")
    if params.top_p is not None and not (_is_number(params.top_p) and 0 <= params.top_p <= 1):
        raise ValueError(f"top_p={params.top_p!r} must be a number in 0..1")
    if params.seed is not None and not (_is_integer(params.seed) and 0 <= params.seed <= MAX_SEED):
        raise ValueError(f"seed={params.seed!r} must be an integer in 0..{MAX_SEED}")
    if not all(_is_integer(token) for token in params.stop_token_ids):
        raise ValueError(f"stop_token_ids={params.stop_token_ids!r} must be integers")
    if not all(isinstance(word, str) for word in params.stop_words):
        raise ValueError(f"stop_words={params.stop_words!r} must be strings")
    if params.end_id is not None and not _is_integer(params.end_id):
        raise ValueError(f"end_id={params.end_id!r} must be an integer (negative: never end)")


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)
