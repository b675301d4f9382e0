"""From a request to the sequences that answer it."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridtrt.runtime.answer import Answer
from hybridtrt.runtime.drafts import NgramDrafter
from hybridtrt.runtime.logits_processors import make_processors
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sampler import temperature_of
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.statistics import RequestTimes
from hybridtrt.runtime.text_stream import TextStream
from hybridtrt.runtime.tokenizer import Tokenizer
from hybridtrt.runtime.validation import MAX_SEED, check_request, stop_ids

if TYPE_CHECKING:
    from hybridtrt.runtime.guided import Guide, Guides


class Intake:
    """Checks requests and prepares what their answers need. Any thread may call it."""

    def __init__(
        self,
        info: RunnerInfo,
        tokenizer: Tokenizer | None,
        max_draft_tokens: int,
        priority_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._info, self._tokenizer, self._clock = info, tokenizer, clock
        self._max_draft_tokens, self._priority_seconds = max_draft_tokens, priority_seconds
        self._guides: Guides | None = None
        self._making_guides = threading.Lock()
        self._numbers = itertools.count()
        self._ends = stop_ids(SamplingParams(), info.eos_token_ids)  # of most requests: one object stays in the caches

    def answers(self, request: Request) -> list[Sequence]:
        """The sequences of a request, of which the first leads the others.

        Raises `ValueError`, one line, when the request is invalid.
        """
        prompt = check_request(request, self._info)
        params = request.params
        words = tuple(word for word in params.stop_words if word)
        if words and self._tokenizer is None:
            raise ValueError(f"stop_words={words!r} need a tokenizer, and the engine has none")
        ends = stop_ids(params, self._info.eos_token_ids)
        ends = self._ends if ends == self._ends else ends
        seed = secrets.randbits(64) if params.seed is None else params.seed
        guide = self._guide(request)
        now = self._clock()
        answers = [
            Sequence(
                request=request,
                prompt=prompt,
                answer=Answer(request, index, self._text(request, words)),
                seed=(seed + index) % (MAX_SEED + 1),
                greedy=temperature_of(params) == 0,
                stop_ids=ends,
                processors=make_processors(request, ends, self._tokenizer, self._info.vocab_size),
                guide=guide.copy() if guide and index else guide,
                drafter=self._drafter(request),
                rank=(now - request.priority * self._priority_seconds, next(self._numbers)),
                times=RequestTimes(now),
            )
            for index in range(params.n)
        ]
        answers[0].followers = answers[1:]
        return answers

    def close(self) -> None:
        """End the threads of guides."""
        if self._guides is not None:
            self._guides.close()

    def _text(self, request: Request, words: tuple[str, ...]) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer, request.prompt_ids, words, request.params.min_tokens)

    def _guide(self, request: Request) -> Guide | None:
        kind, guide = request.params.guide_type, request.params.guide
        if kind is None:
            return None
        if self._tokenizer is None:
            raise ValueError(f"guide_type={kind!r} needs a tokenizer, and the engine has none")
        with self._making_guides:
            if self._guides is None:
                from hybridtrt.runtime.guided import Guides  # here, so that only guides bring llguidance along

                self._guides = Guides(self._tokenizer, self._info.vocab_size, self._info.eos_token_ids)
        return self._guides.compile(kind, guide or "")

    def _drafter(self, request: Request) -> NgramDrafter | None:
        """Guided answers are not drafted: each mask depends on the token before."""
        if not self._max_draft_tokens or request.params.guide_type is not None:
            return None
        return NgramDrafter(request.prompt_ids, self._max_draft_tokens)
