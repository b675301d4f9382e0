"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.request import FinishReason, Output, Request
from hybridtrt.runtime.text_stream import TextStream


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request, how many of them are in the caches, and the slot and pages that it holds.

    `computed` tokens of prompt + outputs are in the caches; the rest is pending. A sequence with one pending token that
    it sampled itself decodes; every other one prefills.
    """

    request: Request
    prompt: NDArray[np.int32]
    seed: int = 0
    greedy: bool = True
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    output_ids: list[int] = field(default_factory=list)
    total: int = 0  # prompt and output tokens
    computed: int = 0
    slot: int = 0
    generation: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)  # by group, kept up to date by the pools
    capacity: int = 0  # tokens that the pages hold

    def __post_init__(self) -> None:
        self.total = len(self.prompt) + len(self.output_ids)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def max_cached(self) -> int:
        """Tokens that are in the caches at most: the last sampled token never enters them."""
        return len(self.prompt) + self.request.params.max_tokens - 1

    @property
    def decoding(self) -> bool:
        """Whether the only pending token is one that the last step sampled."""
        return bool(self.output_ids) and self.total - self.computed == 1

    def pending(self, count: int) -> NDArray[np.int32]:
        """The next `count` tokens to run."""
        stop = self.computed + count
        if stop <= len(self.prompt):
            return self.prompt[self.computed : stop]
        outputs = self.output_ids[max(self.computed - len(self.prompt), 0) : stop - len(self.prompt)]
        return np.concatenate([self.prompt[self.computed :], np.array(outputs, np.int32)])

    def append(self, token: int, log_prob: float) -> Output:
        """Add a sampled token, which is pending now, and return what it adds to the answer.

        The output carries a finish reason when this was the last token. An end token has no text.
        """
        self.output_ids.append(token)
        self.total += 1
        params = self.request.params
        reason: FinishReason | None = None
        if token in self.stop_ids:
            reason = "stop"
        elif len(self.output_ids) >= params.max_tokens:
            reason = "length"
        text = ""
        if self.text is not None:
            text, reason = self._text(self.text, token, reason)
        return Output(self.request.id, (token,), text, (log_prob,) if params.return_log_probs else (), reason)

    def _text(self, stream: TextStream, token: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        text, stopped = ("", False) if reason == "stop" else stream.push(token)
        if reason and not stopped:
            rest, stopped = stream.finish()
            text += rest
        return text, "stop" if stopped else reason
