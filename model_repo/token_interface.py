"""Token ids in, token ids out: the tensors of TensorRT-LLM's `tensorrt_llm` model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridtrt.model_repo.inputs import Inputs, RequestError, Tensors, padded, row
from hybridtrt.model_repo.interface import Ask, Interface, Stop
from hybridtrt.runtime.protocol import Reply


class TokenInterface(Interface):
    """`input_ids` to `output_ids` `[1, answers, n]`; `stop` set: cancel the requests with this request's id."""

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
        stream = inputs.flag("streaming")
        own = {
            "stop_token_ids": _stop_token_ids(inputs),
            "bad_token_ids": inputs.words("bad_words_list"),
            "logit_bias": _biases(inputs),
        }
        return Ask(
            self.submission(inputs, stream, own, input_ids=input_ids[:length]),
            stream=stream,
            echo=not inputs.flag("exclude_input_in_output", default=True),
        )

    def content(self, ask: Ask, replies: Sequence[Reply], echo: Sequence[bool]) -> Tensors:
        prompt = ask.submission.input_ids or ()
        rows = [prompt * echoed + reply.token_ids for reply, echoed in zip(replies, echo, strict=True)]
        return {"output_ids": padded(rows, np.int32, -1), "sequence_length": row(list(map(len, rows)), np.int32)}

    def is_worth_sending(self, reply: Reply) -> bool:
        return bool(reply.token_ids)


def _stop_token_ids(inputs: Inputs) -> tuple[int, ...]:
    words = inputs.words("stop_words_list")
    if any(len(word) > 1 for word in words):
        raise RequestError("stop_words_list holds a word of several tokens, only words of one token are supported")
    return tuple(token for (token,) in words)


def _biases(inputs: Inputs) -> tuple[tuple[int, float], ...]:
    biases = inputs.numbers("embedding_bias")
    expected = inputs.vocab_size
    if biases and expected is not None and len(biases) != expected:
        raise RequestError(f"embedding_bias has {len(biases)} numbers, expected {expected}: one for each token")
    return tuple((token, bias) for token, bias in enumerate(biases) if bias)
