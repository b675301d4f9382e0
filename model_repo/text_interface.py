"""Text in, text out: the tensors of TensorRT-LLM's `ensemble` model."""

from __future__ import annotations

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
        return Ask(
            sampling=self.sampling(inputs),
            text=text,
            messages=messages,
            stream=inputs.flag("stream"),
            echo=echo,
            count_input=inputs.flag("return_num_input_tokens"),
            count_output=inputs.flag("return_num_output_tokens"),
        )

    def content(self, ask: Ask, reply: Reply, first: bool) -> Tensors:
        prompt = ask.text if ask.echo and first and ask.text else ""
        return {"text_output": row([(prompt + reply.text).encode()], np.object_)}

    def is_worth_sending(self, reply: Reply) -> bool:
        return bool(reply.text)
