"""One answer on its way through the engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.answer import Answer
from hybridtrt.runtime.drafts import NgramDrafter
from hybridtrt.runtime.logits_processors import LogitsProcessors
from hybridtrt.runtime.pages import Holding
from hybridtrt.runtime.request import FinishReason, Request, TopLogProbs
from hybridtrt.runtime.rows import Numbers, Rows
from hybridtrt.runtime.statistics import RequestTimes
from hybridtrt.runtime.swap import Swapped

if TYPE_CHECKING:
    from hybridtrt.runtime.guided import Guide

Rank = tuple[float, int]

COMPUTED, PENDING, LAST = map(Numbers._fields.index, ("computed", "pending", "last"))


class InRow:
    """A number of a sequence that is in its row while it runs, and 0 otherwise."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = Numbers._fields.index(name)

    def __get__(self, sequence: Sequence, owner: type) -> int:
        return 0 if sequence.rows is None else sequence.rows.cells[self._field, sequence.row]

    def __set__(self, sequence: Sequence, number: int) -> None:
        assert sequence.rows is not None
        sequence.rows.cells[self._field, sequence.row] = number


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of an answer, how many of them are in the caches, and the slots and pages that it holds.

    `computed` tokens of prompt + outputs are in the caches; the rest is pending. Its recurrent states after `computed`
    tokens are in slot `source`; the next step writes slot `target`, mostly the same one. While it runs these numbers
    are in its `row` of `rows`, where a step changes those of many sequences at once.
    """

    request: Request
    prompt: NDArray[np.int32]
    # These stand together, as they are what a step looks at.
    answer: Answer
    stop_ids: frozenset[int] = frozenset()
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    direct: bool = field(init=False)  # its tokens concern nothing but the answer, which needs no more than them
    # How it samples.
    seed: int = 0
    greedy: bool = True
    processors: LogitsProcessors | None = None
    guide: Guide | None = None
    drafter: NgramDrafter | None = None
    rank: Rank = (0.0, 0)  # the lowest goes first and is preempted last
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))
    followers: list[Sequence] = field(default_factory=list)  # answers that begin with this one's prompt once it is run
    drafts: list[int] = field(default_factory=list)  # assumed tokens of the step that runs
    # What the caches keep of it.
    rows: Rows | None = None  # None: it does not run
    row: int = -1  # of the block tables too
    holdings: list[Holding] = field(default_factory=list)  # by page group
    capacity: int = 0  # tokens that the pages hold
    keys: list[bytes] = field(default_factory=list)  # of the content of its full pages
    registered: int = 0  # tokens whose pages the prefix cache knows
    junction: int = 0  # tokens of the prompt that an earlier one begins with
    next_snapshot: int = 0
    swapped: Swapped | None = None
    # What the request says, at hand.
    name: str = field(init=False)  # unlike all others that live
    max_total: int = field(init=False)  # prompt and output tokens at most
    plain: bool = field(init=False)  # it takes the best token of the model and says no more about it

    def __post_init__(self) -> None:
        self.name = f"{self.request.id}/{self.answer.index}"
        params = self.request.params
        self.max_total = len(self.prompt) + params.max_tokens
        scored = params.return_log_probs or params.top_log_probs > 0
        self.plain = self.greedy and self.processors is None and self.guide is None and not scored
        listeners = (self.processors, self.guide, self.drafter)
        self.direct = all(listener is None for listener in listeners) and self.answer.direct

    room = InRow()
    source = InRow()
    source_generation = InRow()
    target = InRow()
    target_generation = InRow()

    @property
    def running(self) -> bool:
        return self.rows is not None

    @property
    def total(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def computed(self) -> int:
        """Tokens in the caches, or swapped out of them."""
        if self.rows is not None:
            return self.rows.cells[COMPUTED, self.row]
        return 0 if self.swapped is None else self.swapped.tokens

    @computed.setter
    def computed(self, tokens: int) -> None:
        assert self.rows is not None
        self.rows.cells[COMPUTED, self.row] = tokens
        if self.output_ids:
            self.rows.cells[PENDING, self.row] = self.total - tokens

    @property
    def max_cached(self) -> int:
        """Tokens that are in the caches at most: the last sampled token never enters them."""
        return self.max_total - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the next step's logits are those of prompt tokens whose log-probabilities are wanted."""
        wanted = self.request.params.prompt_log_probs is not None and self.answer.index == 0
        return wanted and self.answer.num_prompt_scores < len(self.prompt) - 1

    def pending(self, count: int) -> NDArray[np.int32]:
        """The next `count` tokens to run, drafts included."""
        stop = self.computed + count
        known = self.tokens(self.computed, min(stop, self.total))
        if stop <= self.total:
            return known
        return np.concatenate([known, np.array(self.drafts[: stop - self.total], np.int32)])

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens `start` to `stop - 1` of prompt and output."""
        length = len(self.prompt)
        if stop <= length:
            return self.prompt[start:stop]
        outputs = np.array(self.output_ids[max(start - length, 0) : stop - length], np.int32)
        return outputs if start >= length else np.concatenate([self.prompt[start:], outputs])

    def append(self, token: int, log_prob: float, top: TopLogProbs, valid: bool) -> FinishReason | None:
        """Add a sampled token, which is pending now, and return why it was the last one, if it was.

        Raises `FloatingPointError` when it is not `valid`, and `RuntimeError` when its guide does not allow it.
        """
        if not valid:
            if self.guide is not None and self.guide.error:
                raise RuntimeError(f"the guide allows no token: {self.guide.error}")
            raise FloatingPointError("the logits of this request are not finite, or no token is allowed")
        self.output_ids.append(token)
        if self.rows is not None:
            self.rows.cells[LAST, self.row] = token
            self.rows.cells[PENDING, self.row] = self.total - self.computed
        if self.processors is not None:
            self.processors.append(token)
        if self.drafter is not None:
            self.drafter.append(token)
        reason: FinishReason | None = None
        ended = token in self.stop_ids
        if ended or (self.guide is not None and self._completes(self.guide, token)):
            reason = "stop"
        elif self.total >= self.max_total:
            reason = "length"
        if self.answer.push(token, log_prob, top, not ended):
            return "stop"
        return "stop" if reason and self.answer.finish() else reason

    @staticmethod
    def _completes(guide: Guide, token: int) -> bool:
        guide.accept(token)
        return guide.finished
