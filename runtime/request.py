"""A request, how it samples, and what comes back a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "timed_out", "error"]
TopLogProbs = tuple[tuple[int, float], ...]  # token ids with their log-probabilities, best first


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    It is greedy with temperature, top_k, top_p and min_p unset, with temperature 0 and with top_k 1.

    `stop_token_ids` add to the model's own end tokens; `end_id` replaces them. Stop words match at text level and may
    span tokens; neither they nor what follows them appear in the output. Log-probabilities are those of the model's
    logits: nothing here changes what is reported.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # no end token and no stop word before so many tokens; a guide that is complete ends earlier
    temperature: float | None = None
    top_k: int | None = None  # 0 or None: no limit
    top_p: float | None = None  # 1 or None: no limit
    min_p: float | None = None  # least probability, as a part of the best token's; 0 or None: no limit
    repetition_penalty: float = 1.0  # of every token of prompt and output
    presence_penalty: float = 0.0  # of every token of the output, once
    frequency_penalty: float = 0.0  # of every token of the output, for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and what is added to their logits
    bad_words: tuple[str, ...] = ()  # texts whose tokens are not generated
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are not generated
    seed: int | None = None  # None: a fresh one
    n: int = 1  # answers; answer i samples with seed + i
    beam_width: int = 1  # beam search does not exist: only 1
    stop_token_ids: tuple[int, ...] = ()
    stop_words: tuple[str, ...] = ()
    end_id: int | None = None
    ignore_eos: bool = False
    guide_type: str | None = None  # "json", "json_schema", "regex" or "ebnf_grammar"
    guide: str | None = None  # the schema, expression or grammar that the text must match
    return_log_probs: bool = False  # of the sampled tokens
    top_log_probs: int = 0  # also of so many best tokens at each place
    prompt_log_probs: int | None = None  # of the prompt's tokens, and of so many best ones at each place
    stream_interval: int = 1  # tokens in an output, but for the last


@dataclass(frozen=True)
class Request:
    """One prompt to go on with.

    Of waiting requests the one of higher `priority` (0 to 1) goes first, but not for ever. `allotted_time_ms` from its
    submission on it ends with what it has. Only requests of equal `cache_salt` share cached prefixes.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: float = 0.5
    allotted_time_ms: int | None = None
    cache_salt: str = ""


@dataclass  # not frozen, which would triple the time to make one: there is one a token
class Output:
    """What one step added to one answer: deltas, never the prompt. The last one carries `finish_reason`.

    `token_ids` are all tokens that were sampled, with the end token that stopped the answer (as transformers'
    generate); `text` omits special tokens and stop words, is complete UTF-8, and is empty while a character or a
    possible stop word is held back. `error` is set when `finish_reason` is "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0  # which of the request's n answers
    more: bool = False  # other answers of the request go on after this one has finished
    top_log_probs: tuple[TopLogProbs, ...] = ()  # one entry a token
    prompt_log_probs: tuple[tuple[float, TopLogProbs], ...] = ()  # of prompt tokens 1.., with the answer's first output

    @property
    def ends_request(self) -> bool:
        """Whether nothing comes after this."""
        return self.finish_reason is not None and not self.more
