"""Log-probabilities of replies as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridtrt.model_repo.inputs import Tensors, padded, row
from hybridtrt.runtime.protocol import Reply
from hybridtrt.runtime.request import SamplingParams, TopLogProbs


def log_prob_tensors(sampling: SamplingParams, replies: Sequence[Reply]) -> Tensors:
    """What was asked for, of one reply to each answer.

    Of the output `[1, answers, tokens]` and, for the k best, `[1, answers, tokens, k]`; of the prompt, which is there
    once, `[1, tokens - 1]` and `[1, tokens - 1, k]`.
    """
    tensors = {}
    if sampling.return_log_probs:
        tensors["output_log_probs"] = padded([reply.log_probs for reply in replies], np.float32, 0)
    if sampling.top_log_probs:
        tops = [_split(reply.top_log_probs) for reply in replies]
        width = max((len(place) for ids, _ in tops for place in ids), default=0)
        tensors["output_top_token_ids"] = padded([ids for ids, _ in tops], np.int32, -1, width)
        tensors["output_top_log_probs"] = padded([values for _, values in tops], np.float32, 0, width)
    if prompt := next((reply.prompt_log_probs for reply in replies if reply.prompt_log_probs), ()):
        tensors["prompt_log_probs"] = row([value for value, _ in prompt], np.float32)
        if sampling.prompt_log_probs:
            ids, values = _split([top for _, top in prompt])
            tensors["prompt_top_token_ids"] = row(ids, np.int32)
            tensors["prompt_top_log_probs"] = row(values, np.float32)
    return tensors


def _split(tops: Sequence[TopLogProbs]) -> tuple[list[list[int]], list[list[float]]]:
    """The token ids of each place, and their log-probabilities."""
    return [[token for token, _ in top] for top in tops], [[value for _, value in top] for top in tops]
