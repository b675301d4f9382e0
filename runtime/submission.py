"""A request as a client of the engine process sends it, and what the engine gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hybridtrt.runtime.request import Request, SamplingParams


class EncodesPrompts(Protocol):
    """What is needed of a tokenizer, from one thread of its own."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]: ...
    def encode_messages(self, messages: str) -> Sequence[int]: ...


@dataclass(frozen=True)
class Submission:
    """What a client asks for; exactly one of `text`, `messages` (JSON, for the chat template) and `input_ids`."""

    id: str
    text: str | None = None
    messages: str | None = None
    input_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logit_bias_words: tuple[tuple[str, float], ...] = ()  # adds to `sampling.logit_bias`; each word is one token
    priority: float = Request.priority
    allotted_time_ms: int | None = None
    cache_salt: str = ""
    tag: str = ""  # what `stop` names; not unique

    def request(self, request_id: str, tokenizer: EncodesPrompts | None) -> Request:
        """The engine's request.

        Raises:
            ValueError: text without a tokenizer, text that cannot be encoded, or a word with a bias that is several
                tokens.
        """
        return Request(
            request_id,
            self._prompt_ids(tokenizer),
            self._sampling(tokenizer),
            self.priority,
            self.allotted_time_ms,
            self.cache_salt,
        )

    def _prompt_ids(self, tokenizer: EncodesPrompts | None) -> tuple[int, ...]:
        if self.input_ids is not None:
            return self.input_ids
        tokenizer = _wanted(tokenizer)
        if self.messages is not None:
            return tuple(tokenizer.encode_messages(self.messages))
        return tuple(tokenizer.encode(self.text or ""))

    def _sampling(self, tokenizer: EncodesPrompts | None) -> SamplingParams:
        if not self.logit_bias_words:
            return self.sampling
        tokenizer, bias = _wanted(tokenizer), list(self.sampling.logit_bias)
        for word, value in self.logit_bias_words:
            ids = tokenizer.encode(word, add_special_tokens=False)
            if len(ids) != 1:
                raise ValueError(f"the word {word!r} with a bias is {len(ids)} tokens, expected a single token")
            bias.append((ids[0], value))
        return replace(self.sampling, logit_bias=tuple(bias))


def _wanted(tokenizer: EncodesPrompts | None) -> EncodesPrompts:
    if tokenizer is None:
        raise ValueError("the engine folder has no tokenizer: send token ids instead of text")
    return tokenizer
