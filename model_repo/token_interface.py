"""Token ids in, token ids out: the tensors of TensorRT-LLM's `tensorrt_llm` model."""

from __future__ import annotations

import numpy as np

from hybridtrt.model_repo.inputs import Inputs, RequestError, Tensors, row
from hybridtrt.model_repo.interface import Ask, Interface, Stop
from hybridtrt.runtime.protocol import Reply


class TokenInterface(Interface):
    """`input_ids` to `output_ids` `[1, beam 1, n]`; `stop` set: cancel the requests with this request's id."""

    max_tokens_input = "request_output_len"
    top_k_input = "runtime_top_k"
    top_p_input = "runtime_top_p"

    def parse(self, inputs: Inputs) -> Ask | Stop:
        if inputs.flag("stop"):
            return Stop()
        input_ids = inputs.ids("input_ids")
        if input_ids is None:
            raise RequestError("input_ids is missing")
        length = inputs.integer("input_lengths")
        if length is not None and not 0 <= length <= len(input_ids):
            raise RequestError(f"input_lengths={length} does not fit input_ids of {len(input_ids)} tokens")
        return Ask(
            sampling=self.sampling(inputs, _stop_token_ids(inputs)),
            input_ids=input_ids[:length],
            stream=inputs.flag("streaming"),
            echo=not inputs.flag("exclude_input_in_output", default=True),
        )

    def content(self, ask: Ask, reply: Reply, first: bool) -> Tensors:
        prompt = ask.input_ids if ask.echo and first and ask.input_ids else ()
        token_ids = (*prompt, *reply.token_ids)
        return {
            "output_ids": row([token_ids], np.int32),
            "sequence_length": row([len(token_ids)], np.int32),
        }

    def is_worth_sending(self, reply: Reply) -> bool:
        return bool(reply.token_ids)


def _stop_token_ids(inputs: Inputs) -> tuple[int, ...]:
    """The words of `stop_words_list` `[1, 2, n]`: their tokens end to end, and where each word ends (-1: no more)."""
    words = inputs.array("stop_words_list")
    if words is None or words.size == 0:
        return ()
    tokens, ends = words.reshape(2, -1).tolist()
    ends = [end for end in ends if end > 0]
    if ends != list(range(1, len(ends) + 1)):
        raise RequestError("stop_words_list holds a word of several tokens, only words of one token are supported")
    return tuple(tokens[: len(ends)])
