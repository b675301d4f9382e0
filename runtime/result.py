"""What a request got in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrt.runtime.request import FinishReason, Output, TopLogProbs


@dataclass(frozen=True)
class Result:
    """The outputs of one answer, joined; the fields are those of `Output`."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    error: str | None = None
    index: int = 0
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[tuple[float, TopLogProbs], ...] = ()


def join(outputs: Sequence[Output]) -> Result:
    """Join the outputs of one finished answer, in the order in which they came.

    Raises `ValueError` when the last one does not carry a finish reason.
    """
    if not outputs or outputs[-1].finish_reason is None:
        raise ValueError("the outputs are not those of a finished answer")
    return Result(
        request_id=outputs[-1].request_id,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        log_probs=tuple(value for output in outputs for value in output.log_probs),
        finish_reason=outputs[-1].finish_reason,
        error=outputs[-1].error,
        index=outputs[-1].index,
        top_log_probs=tuple(top for output in outputs for top in output.top_log_probs),
        prompt_log_probs=tuple(place for output in outputs for place in output.prompt_log_probs),
    )
