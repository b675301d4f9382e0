"""Sampling of the sequences of one step, each with its own parameters."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.sample import Sampled, SampleParams
from hybridtrt.plugins.sample.fastest import log_normalizer, sample
from hybridtrt.plugins.sample.reference import greedy
from hybridtrt.plugins.sample.vectorized import largest
from hybridtrt.runtime.logits_processors import FORBIDDEN
from hybridtrt.runtime.request import SamplingParams, TopLogProbs
from hybridtrt.runtime.sequence import Sequence

F32 = NDArray[np.float32]
Bitmask = NDArray[np.uint32]  # [ceil(V/32)]: bit t % 32 of word t // 32 allows token t


@dataclass(frozen=True)
class Choice:
    """What was sampled, row by row.

    `log_probs` is NaN and `top` is () where they were not asked for. A row is not `valid` when its logits are not
    finite or every token is forbidden; its token means nothing.
    """

    tokens: list[int]
    array: NDArray[np.int64]  # the same
    log_probs: list[float]
    valid: list[bool]
    top: list[TopLogProbs]


def choose(
    logits: F32,
    sequences: Rows[Sequence],
    ahead: Rows[int],
    masks: Rows[Bitmask | None] | None = None,
    special: Rows[int] | None = None,
) -> Choice:
    """Sample one token for each row of `logits` [R, V].

    Row i is `ahead[i]` tokens after the next one of `sequences[i]`, whose first `ahead[i]` drafts are taken for output.
    Only the `special` rows (None: all) are not `plain`.
    The request's logits processors come first, then `masks[i]`, then temperature, top-k, top-p and min-p. The token is
    a function of the row, the request, its seed, the position and the history, so nothing depends on the other rows.
    Log-probabilities are those of the model's logits.
    """
    special = range(len(sequences)) if special is None else special
    changed = {i for i in special if sequences[i].processors is not None or (masks and masks[i] is not None)}
    result = _sample(logits, sequences, ahead, [i for i in special if i not in changed])
    for i in changed:
        row = logits[i : i + 1].copy()
        _change(row[0], sequences[i], ahead[i], masks[i] if masks else None)
        again = _sample(row, sequences[i : i + 1], ahead[i : i + 1], [0])
        result.tokens[i] = again.tokens[0]
        result.valid[i] &= again.valid[0]
    choice = Choice(
        tokens=result.tokens.tolist(),
        array=result.tokens,
        log_probs=[math.nan] * len(sequences),
        valid=result.valid.tolist(),
        top=[()] * len(sequences),
    )
    for i in special:
        params = sequences[i].request.params
        if (params.return_log_probs or params.top_log_probs) and choice.valid[i]:
            choice.log_probs[i], choice.top[i] = _log_probs(logits[i], choice.tokens[i], params.top_log_probs)
    return choice


def prompt_log_probs(logits: F32, tokens: Rows[int], k: int) -> tuple[tuple[float, TopLogProbs], ...]:
    """Log-probabilities of the `tokens` [N] of a prompt, and of the `k` best at each place, from `logits` [N, V].

    Row i holds the logits of the place before token i. Where they are not finite the result is (NaN, ()).
    """
    return tuple(_log_probs(row, int(token), k) for row, token in zip(logits, tokens, strict=True))


def temperature_of(params: SamplingParams) -> float:
    """The temperature in force, 0 for greedy; 1 when only top-k, top-p or min-p is given."""
    if params.top_k == 1 or params.top_p == 0:
        return 0.0
    if params.temperature is not None:
        return params.temperature
    return 1.0 if params.top_k or (params.top_p or 1) < 1 or params.min_p else 0.0


def _sample(logits: F32, sequences: Rows[Sequence], ahead: Rows[int], among: Collection[int]) -> Sampled:
    """A token for each row of `logits` [R, V]: the best, but for those `among` them that want to be sampled."""
    random = [i for i in among if not sequences[i].greedy]
    return sample(logits, _params(sequences, ahead, random, logits.shape[1])) if random else greedy(logits)


def _params(sequences: Rows[Sequence], ahead: Rows[int], random: Collection[int], vocab_size: int) -> SampleParams:
    """Greedy, but for the rows `random`."""
    rows = len(sequences)
    params = SampleParams(
        temperature=np.zeros(rows),
        top_k=np.zeros(rows, np.int64),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seeds=np.zeros(rows, np.uint64),
        positions=np.zeros(rows, np.int64),
    )
    for i in random:
        asked = sequences[i].request.params
        params.temperature[i] = temperature_of(asked)
        params.top_k[i] = min(asked.top_k or 0, vocab_size)
        params.top_p[i] = 1.0 if asked.top_p is None else asked.top_p
        params.min_p[i] = asked.min_p or 0.0
        params.seeds[i] = sequences[i].seed
        params.positions[i] = sequences[i].total + ahead[i]
    return params


def _change(row: F32, sequence: Sequence, ahead: int, mask: Bitmask | None) -> None:
    """Apply the processors and the mask, where there are any, to a row of logits `[V]`."""
    if sequence.processors is not None:
        sequence.processors.apply(row, sequence.drafts[:ahead])
    if mask is not None:
        allowed = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=len(row), bitorder="little")
        np.putmask(row, allowed == 0, FORBIDDEN)


def _log_probs(row: F32, token: int, count: int) -> tuple[float, TopLogProbs]:
    """The log-probability of a token under a row of logits `[V]`, and those of the `count` best tokens."""
    normalizer = log_normalizer(row)
    top: TopLogProbs = ()
    if count and not math.isnan(normalizer):
        best = largest(row, min(count, len(row)))
        best = best[np.argsort(-row[best], kind="stable")]
        top = tuple((token, logit - normalizer) for token, logit in zip(best.tolist(), row[best].tolist(), strict=True))
    return float(row[token]) - normalizer, top
