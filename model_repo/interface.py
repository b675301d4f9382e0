"""What the text and the token interface share: a request as parsed, and replies made into tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridtrt.model_repo.inputs import Inputs, RequestError, Tensors, row
from hybridtrt.model_repo.log_probs import log_prob_tensors
from hybridtrt.runtime.protocol import Reply
from hybridtrt.runtime.request import SamplingParams
from hybridtrt.runtime.submission import Submission


@dataclass(frozen=True)
class Ask:
    """A request that has been checked as far as its own values go; the engine checks them against its limits."""

    submission: Submission  # without id and tag
    stream: bool = False
    echo: bool = False  # the prompt precedes each answer, as exclude_input_in_output=false asks for
    count_input: bool = False
    count_output: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.submission.sampling


@dataclass(frozen=True)
class Stop:
    """Not a request of its own: cancel those that carry the same request id."""


NOTHING = Ask(Submission(""))


@dataclass
class Answer:
    """What the responses so far have carried of one answer."""

    responses: int = 0
    tokens: int = 0
    cum_log_prob: float = 0.0


@dataclass
class Progress:
    """What the responses so far have carried of a request."""

    prompt_tokens: int = 0
    answers: defaultdict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))

    def add(self, reply: Reply) -> Answer:
        answer = self.answers[reply.index]
        answer.responses += 1
        answer.tokens += len(reply.token_ids)
        answer.cum_log_prob += sum(reply.log_probs)
        self.prompt_tokens = reply.num_prompt_tokens or self.prompt_tokens
        return answer


# The inputs that set fields of `SamplingParams`, where both models have the same ones.
INTEGERS = {
    "min_tokens": "min_tokens",
    "n": "num_return_sequences",
    "beam_width": "beam_width",
    "end_id": "end_id",
    "top_log_probs": "top_log_probs",
    "prompt_log_probs": "prompt_log_probs",
}
NUMBERS = ("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TEXTS = {"guide_type": "guided_decoding_guide_type", "guide": "guided_decoding_guide"}


class Interface(ABC):
    """Names and layout of one Triton model's tensors."""

    max_tokens_input: str
    top_k_input = "top_k"
    top_p_input = "top_p"

    @abstractmethod
    def parse(self, inputs: Inputs) -> Ask | Stop:
        """Raises: RequestError: a value that is missing, wrong or not supported."""

    @abstractmethod
    def content(self, ask: Ask, replies: Sequence[Reply], echo: Sequence[bool]) -> Tensors:
        """The tensors of the new tokens, one row a reply; `echo`: whether the prompt precedes them."""

    @abstractmethod
    def is_worth_sending(self, reply: Reply) -> bool:
        """Whether an unfinished reply has something that the client can use."""

    def render(self, ask: Ask, replies: Sequence[Reply], progress: Progress) -> Tensors:
        """The tensors of a response, `[batch 1, answers, ...]`: a reply to each answer. The progress counts it."""
        answers = [progress.add(reply) for reply in replies]
        tensors = dict(self.content(ask, replies, [ask.echo and answer.responses == 1 for answer in answers]))
        if ask.sampling.n > 1:
            tensors["sequence_index"] = row([reply.index for reply in replies], np.int32)
        if all(reply.finish_reason for reply in replies):
            tensors["finish_reason"] = row([str(reply.finish_reason).encode() for reply in replies], np.object_)
        tensors |= log_prob_tensors(ask.sampling, replies)
        if ask.sampling.return_log_probs:
            tensors["cum_log_probs"] = row([answer.cum_log_prob for answer in answers], np.float32)
        if ask.count_input:
            tensors["num_input_tokens"] = row([progress.prompt_tokens], np.int32)
        if ask.count_output:
            tensors["num_output_tokens"] = row([answer.tokens for answer in answers], np.int32)
        return tensors

    def submission(self, inputs: Inputs, stream: bool, own: Mapping[str, Any], **fields: Any) -> Submission:
        """What goes to the engine: the inputs that both models have, a model's `own` fields of `SamplingParams`, and
        `fields` of the submission itself.

        Raises:
            RequestError: a value that is missing or contradicts another.
        """
        sampling = {
            "max_tokens": inputs.integer(self.max_tokens_input),
            "top_k": inputs.integer(self.top_k_input),
            "top_p": inputs.number(self.top_p_input),
            "seed": _seed(inputs),
            "return_log_probs": inputs.flag("return_log_probs"),
            **{name: inputs.integer(source) for name, source in INTEGERS.items()},
            **{name: inputs.number(name) for name in NUMBERS},
            **{name: inputs.text(source) or None for name, source in TEXTS.items()},
            "stream_interval": inputs.integer("stream_interval"),
            **own,
        }
        interval = sampling["stream_interval"]
        if not stream and (interval is None or interval > 0):  # the whole answer at once
            sampling["stream_interval"] = sampling["max_tokens"]
        if sampling["max_tokens"] is None:
            raise RequestError(f"{self.max_tokens_input} is missing")
        request = {
            "priority": inputs.number("priority"),
            "allotted_time_ms": inputs.allotted_time_ms(),
            "cache_salt": inputs.text("cache_salt"),
        }
        return Submission("", sampling=SamplingParams(**_given(sampling)), **_given(request), **fields)


def merge(replies: Sequence[Reply]) -> Reply:
    """Consecutive replies to one request, all of one answer, as one."""
    last = replies[-1]
    return Reply(
        request_id=last.request_id,
        token_ids=tuple(token for reply in replies for token in reply.token_ids),
        text="".join(reply.text for reply in replies),
        log_probs=tuple(value for reply in replies for value in reply.log_probs),
        finish_reason=last.finish_reason,
        error=last.error,
        index=last.index,
        more=last.more,
        top_log_probs=tuple(top for reply in replies for top in reply.top_log_probs),
        prompt_log_probs=tuple(place for reply in replies for place in reply.prompt_log_probs),
        code=last.code,
        num_prompt_tokens=next((r.num_prompt_tokens for r in replies if r.num_prompt_tokens is not None), None),
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _seed(inputs: Inputs) -> int | None:
    seed, alias = inputs.integer("seed"), inputs.integer("random_seed")
    if seed is not None and alias is not None and seed != alias:
        raise RequestError(f"seed={seed} and random_seed={alias} contradict each other")
    return alias if seed is None else seed
