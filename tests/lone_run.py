"""What a request gets alone, by definition: no caches, no batches, no drafts, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.logits_processors import make_processors
from hybridtrt.runtime.request import FinishReason, Request, SamplingParams, TopLogProbs
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sampler import choose, prompt_log_probs, temperature_of
from hybridtrt.runtime.validation import stop_ids

NextLogits = Callable[[Sequence[int]], NDArray[np.float32]]


@dataclass
class Answer:
    """One of the n answers of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[tuple[float, TopLogProbs]] = field(default_factory=list)
    finish_reason: FinishReason = "length"


def lone_answer(
    request: Request, index: int, info: RunnerInfo, next_logits: NextLogits, pieces: Sequence[str] = ()
) -> Answer:
    """Answer `index` of a request, where `next_logits` gives the logits `[vocab]` after a history.

    The text of token `i` is `pieces[i]`; without pieces there is none.
    """
    params, answer = request.params, Answer()
    history = list(request.prompt_ids)
    ends = stop_ids(params, info.eos_token_ids)
    sequence = SimpleNamespace(
        request=request,
        seed=((params.seed or 0) + index) % 2**64,
        greedy=temperature_of(params) == 0,
        total=len(history),
        drafts=[],
        plain=False,
        processors=make_processors(request, ends, None, info.vocab_size),
    )
    if params.prompt_log_probs is not None and index == 0 and len(history) > 1:
        logits = np.stack([next_logits(history[: i + 1]) for i in range(len(history) - 1)])
        answer.prompt_log_probs += prompt_log_probs(logits, np.array(history[1:]), params.prompt_log_probs)
    while len(answer.token_ids) < params.max_tokens:
        choice = choose(next_logits(history)[None], [sequence], [0], None)  # type: ignore[list-item]
        (token,) = choice.tokens
        history.append(token)
        answer.token_ids.append(token)
        if params.return_log_probs:
            answer.log_probs += choice.log_probs
        if params.top_log_probs:
            answer.top_log_probs += choice.top
        if token in ends or (pieces and _stops(answer, pieces[token], params)):
            answer.finish_reason = "stop"
            break
        sequence.total += 1
        if sequence.processors is not None:
            sequence.processors.append(token)
    return answer


def _stops(answer: Answer, piece: str, params: SamplingParams) -> bool:
    """Add the text of a token; whether it completes a stop word, at which the text is cut."""
    before, text = len(answer.text), answer.text + piece
    found = [
        (end, end - len(word))
        for word in params.stop_words
        for end in range(before + 1, len(text) + 1)
        if text[:end].endswith(word)
    ]
    stops = bool(found) and len(answer.token_ids) >= params.min_tokens
    answer.text = text[: min(found)[1]] if stops else text
    return stops
