"""Text in, text out: the tensors of TensorRT-LLM's `ensemble` model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridtrt.model_repo.inputs import Inputs, RequestError, Tensors, row
from hybridtrt.model_repo.interface import Ask, Interface
from hybridtrt.runtime.protocol import Reply


class TextInterface(Interface):
    """`text_input`, or `messages` (JSON) for the chat template, to `text_output`: deltas when `stream` is set."""

    max_tokens_input = "max_tokens"

    def parse(self, inputs: Inputs) -> Ask:
        text, messages = inputs.text("text_input"), inputs.text("messages")
        if (text is None) == (messages is None):
            raise RequestError("exactly one of text_input and messages is wanted")
        echo = not inputs.flag("exclude_input_in_output", default=True)
        if echo and messages is not None:
            raise RequestError("exclude_input_in_output=false is not supported with messages")
        stream = inputs.flag("stream")
        own = {name: tuple(word for word in inputs.texts(name) if word) for name in ("stop_words", "bad_words")}
        return Ask(
            self.submission(inputs, stream, own, text=text, messages=messages, logit_bias_words=_biased_words(inputs)),
            stream=stream,
            echo=echo,
            count_input=inputs.flag("return_num_input_tokens"),
            count_output=inputs.flag("return_num_output_tokens"),
        )

    def content(self, ask: Ask, replies: Sequence[Reply], echo: Sequence[bool]) -> Tensors:
        prompt = ask.submission.text or ""
        texts = [prompt * echoed + reply.text for reply, echoed in zip(replies, echo, strict=True)]
        return {"text_output": row([text.encode() for text in texts], np.object_)}

    def is_worth_sending(self, reply: Reply) -> bool:
        return bool(reply.text)


def _biased_words(inputs: Inputs) -> tuple[tuple[str, float], ...]:
    words, weights = inputs.texts("embedding_bias_words"), inputs.numbers("embedding_bias_weights")
    if len(words) != len(weights):
        raise RequestError(f"embedding_bias_words are {len(words)} and embedding_bias_weights {len(weights)}")
    return tuple((word, weight) for word, weight in zip(words, weights, strict=True) if word)
