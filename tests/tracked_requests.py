"""Requests on their way through an engine over a `NullRunner`: what they get is held against the lone run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from engine_strategies import PIECES
from lone_run import Answer, lone_answer
from null_runner import lone_logits
from numpy.typing import NDArray

from hybridtrt.runtime.request import FinishReason, Output, Request
from hybridtrt.runtime.runner import RunnerInfo


@dataclass
class Tracked:
    """A request with what it has got so far and what it may get."""

    request: Request
    info: RunnerInfo
    deadline: float | None
    cancelled: bool = False
    answers: list[Answer] = field(init=False)
    ended: list[FinishReason | None] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = [Answer() for _ in range(self.request.params.n)]
        self.ended = [None] * self.request.params.n

    @cached_property
    def expected(self) -> list[Answer]:
        """By definition, without an engine."""

        def next_logits(history: Sequence[int]) -> NDArray[np.float32]:
            return lone_logits(history, self.info)

        return [lone_answer(self.request, i, self.info, next_logits, PIECES) for i in range(self.request.params.n)]

    @property
    def work(self) -> int:
        """Tokens to run."""
        return len(self.request.prompt_ids) + self.request.params.n * self.request.params.max_tokens

    def is_late(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    def take(self, output: Output, now: float, broken: bool) -> None:
        """Add an output, and compare an answer that ends with it. `broken`: its step failed."""
        answer, i = self.answers[output.index], output.index
        assert self.ended[i] is None, "an answer goes on after its end"
        assert output.finish_reason or len(output.token_ids) >= self.request.params.stream_interval
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.log_probs += output.log_probs
        answer.top_log_probs += output.top_log_probs
        answer.prompt_log_probs += output.prompt_log_probs
        self.ended[i] = output.finish_reason
        if output.finish_reason is None:
            return
        assert output.more == (None in self.ended)
        if output.finish_reason in ("stop", "length"):
            answer.finish_reason = output.finish_reason
            assert answer == self.expected[i]
        else:
            assert {
                "cancelled": self.cancelled,
                "timed_out": self.is_late(now),
                "error": broken and output.error == "RuntimeError: broken",
            }[output.finish_reason], output
            assert answer.token_ids == self.expected[i].token_ids[: len(answer.token_ids)]
            text = "".join(PIECES[token] for token in answer.token_ids)
            assert text.startswith(answer.text) if output.error else text == answer.text
            assert answer.log_probs == self.expected[i].log_probs[: len(answer.log_probs)]
