"""A request, how it samples, and what comes back a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. With temperature, top_k and top_p unset (or temperature 0, or top_k 1) it is greedy.

    `stop_token_ids` add to the model's own end tokens; `end_id` replaces them. Stop words match at text level and may
    span tokens; neither they nor what follows them appear in the output.
    """

    max_tokens: int = 16
    temperature: float | None = None
    top_k: int | None = None  # 0 or None: no limit
    top_p: float | None = None  # 1 or None: no limit
    seed: int | None = None  # None: a fresh one
    stop_token_ids: tuple[int, ...] = ()
    stop_words: tuple[str, ...] = ()
    end_id: int | None = None
    ignore_eos: bool = False
    return_log_probs: bool = False


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Output:
    """What one step added to one request: deltas, never the prompt. The last one carries `finish_reason`.

    `token_ids` are all tokens that were sampled, with the end token that stopped the request (as transformers'
    generate); `text` omits special tokens and stop words, is complete UTF-8, and is empty while a character or a
    possible stop word is held back. `error` is set when `finish_reason` is "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
