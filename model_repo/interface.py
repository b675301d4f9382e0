"""What the text and the token interface share: a request as parsed, and replies made into tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridtrt.model_repo.inputs import Inputs, RequestError, Tensors, row
from hybridtrt.runtime.protocol import Reply
from hybridtrt.runtime.request import SamplingParams


@dataclass(frozen=True)
class Ask:
    """A request that has been checked as far as its own values go; the engine checks them against its limits."""

    sampling: SamplingParams
    text: str | None = None
    messages: str | None = None
    input_ids: tuple[int, ...] | None = None
    stream: bool = False
    echo: bool = False  # the prompt precedes the output, as exclude_input_in_output=false asks for
    count_input: bool = False
    count_output: bool = False


@dataclass(frozen=True)
class Stop:
    """Not a request of its own: cancel those that carry the same request id."""


NOTHING = Ask(SamplingParams())


@dataclass
class Progress:
    """What a request's earlier responses have carried."""

    responses: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cum_log_prob: float = 0.0


class Interface(ABC):
    """Names and layout of one Triton model's tensors."""

    max_tokens_input: str
    top_k_input = "top_k"
    top_p_input = "top_p"

    @abstractmethod
    def parse(self, inputs: Inputs) -> Ask | Stop:
        """Raises: RequestError: a value that is missing, wrong or not supported."""

    @abstractmethod
    def content(self, ask: Ask, reply: Reply, first: bool) -> Tensors:
        """The tensors of the new tokens; `first`: of the request's first response."""

    @abstractmethod
    def is_worth_sending(self, reply: Reply) -> bool:
        """Whether an unfinished reply has something that the client can use."""

    def render(self, ask: Ask, reply: Reply, progress: Progress) -> Tensors:
        """The tensors of a response, `[batch 1, ...]`, and the progress brought up to it."""
        if reply.num_prompt_tokens is not None:
            progress.prompt_tokens = reply.num_prompt_tokens
        progress.tokens += len(reply.token_ids)
        progress.cum_log_prob += sum(reply.log_probs)
        tensors = dict(self.content(ask, reply, progress.responses == 0))
        if ask.sampling.return_log_probs:
            tensors["output_log_probs"] = row([reply.log_probs], np.float32)
            tensors["cum_log_probs"] = row([progress.cum_log_prob], np.float32)
        if reply.finish_reason is not None:
            tensors["finish_reason"] = row([reply.finish_reason.encode()], np.object_)
        if ask.count_input:
            tensors["num_input_tokens"] = row([progress.prompt_tokens], np.int32)
        if ask.count_output:
            tensors["num_output_tokens"] = row([progress.tokens], np.int32)
        progress.responses += 1
        return tensors

    def sampling(self, inputs: Inputs, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        """Raises: RequestError: a value that is missing or contradicts another."""
        max_tokens = inputs.integer(self.max_tokens_input)
        if max_tokens is None:
            raise RequestError(f"{self.max_tokens_input} is missing")
        seed, alias = inputs.integer("seed"), inputs.integer("random_seed")
        if seed is not None and alias is not None and seed != alias:
            raise RequestError(f"seed={seed} and random_seed={alias} contradict each other")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=inputs.number("temperature"),
            top_k=inputs.integer(self.top_k_input),
            top_p=inputs.number(self.top_p_input),
            seed=alias if seed is None else seed,
            stop_token_ids=stop_token_ids,
            stop_words=inputs.texts("stop_words"),
            end_id=inputs.integer("end_id"),
            return_log_probs=inputs.flag("return_log_probs"),
        )


def merge(replies: Sequence[Reply]) -> Reply:
    """Consecutive replies to one request as one."""
    last = replies[-1]
    return Reply(
        request_id=last.request_id,
        token_ids=tuple(token for reply in replies for token in reply.token_ids),
        text="".join(reply.text for reply in replies),
        log_probs=tuple(value for reply in replies for value in reply.log_probs),
        finish_reason=last.finish_reason,
        error=last.error,
        code=last.code,
        num_prompt_tokens=next((r.num_prompt_tokens for r in replies if r.num_prompt_tokens is not None), None),
    )
