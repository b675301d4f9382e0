"""Sampling of the sequences of one step, each with its own parameters."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.sample import SampleParams
from hybridtrt.plugins.sample.cpu import sample
from hybridtrt.plugins.sample.reference import greedy, log_probs
from hybridtrt.runtime.request import SamplingParams
from hybridtrt.runtime.sequence import Sequence


@dataclass(frozen=True)
class Choice:
    """What was sampled, row by row. `log_probs` is NaN where it was not asked for."""

    tokens: list[int]
    log_probs: list[float]
    valid: list[bool]


def choose(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> Choice:
    """Sample the next token of each sequence from its row of `logits` [R, V].

    Nothing in a row depends on the other rows.
    """
    result = greedy(logits)
    random = [i for i, sequence in enumerate(sequences) if not sequence.greedy]
    if random:
        rows = np.array(random)
        params = _params([sequences[i] for i in random])
        result.tokens[rows] = sample(logits if len(rows) == len(logits) else logits[rows], params).tokens
    probs = np.full(len(sequences), np.nan)
    asked = [i for i, sequence in enumerate(sequences) if sequence.request.params.return_log_probs and result.valid[i]]
    if asked:
        probs[asked] = log_probs(logits[asked], result.tokens[asked])
    return Choice(result.tokens.tolist(), probs.tolist(), result.valid.tolist())


def temperature_of(params: SamplingParams) -> float:
    """The temperature in force, 0 for greedy; 1 when only top-k or top-p is given."""
    if params.top_k == 1 or params.top_p == 0:
        return 0.0
    if params.temperature is not None:
        return params.temperature
    return 1.0 if params.top_k or (params.top_p or 1) < 1 else 0.0


def _params(sequences: Rows[Sequence]) -> SampleParams:
    params = [sequence.request.params for sequence in sequences]
    return SampleParams(
        temperature=np.array([temperature_of(p) for p in params], np.float64),
        top_k=np.array([p.top_k or 0 for p in params], np.int64),
        top_p=np.array([1.0 if p.top_p is None else p.top_p for p in params], np.float64),
        seeds=np.array([sequence.seed for sequence in sequences], np.uint64),
        positions=np.array([sequence.total for sequence in sequences], np.int64),
    )
