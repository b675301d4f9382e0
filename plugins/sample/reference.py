"""Sampling, as defined: vectorised over rows, with a full sort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.sample.params import Sampled, SampleParams
from hybridtrt.plugins.sample.philox import uniform

Logits = NDArray[np.float32] | NDArray[np.float64]


def sample(logits: Logits, params: SampleParams) -> Sampled:
    """Choose one token of each row of `logits` [R, V], in float64.

    Rows with temperature 0 are greedy. Others follow TensorRT-LLM's order: divide by the temperature; keep the `top_k`
    largest; of these keep the shortest run from the largest on whose probability, relative to what top-k kept, reaches
    `top_p` (at least one token). Ties are ranked by id. The token is the first, in order of ids, at which the
    cumulative probability of what was kept exceeds the row's uniform number.
    """
    result = greedy(logits)
    chosen = result.valid & (params.temperature > 0)
    if chosen.any():
        scaled = _scaled(logits[chosen], params.temperature[chosen])
        weights = np.exp(scaled)
        weights[~_kept(scaled, weights, params.top_k[chosen], params.top_p[chosen])] = 0
        result.tokens[chosen] = pick(weights, uniform(params.seeds[chosen], params.positions[chosen]))
    return result


def greedy(logits: Logits) -> Sampled:
    """The largest logit of each row of `logits` [R, V], the lowest id among equals."""
    tokens = logits.argmax(axis=1)
    best = logits[np.arange(len(logits)), tokens]
    return Sampled(tokens, np.isfinite(best))  # argmax finds a NaN if there is one


def log_probs(logits: Logits, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Natural log-probabilities `[R]` of `tokens` [R] under the softmax of `logits` [R, V].

    The logits are those of the model: temperature, top-k and top-p do not change what is reported.
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(tokens)), tokens]
    return np.asarray(chosen - np.log(np.exp(shifted).sum(axis=1)))


def pick(weights: NDArray[np.float64], uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first index of each row of `weights` [R, N] whose cumulative weight exceeds uniform × total, `[R]`."""
    cumulative = np.cumsum(weights, axis=1)
    total = cumulative[:, -1]
    targets = np.minimum(uniforms * total, np.nextafter(total, 0))  # the product may round up to the total
    return np.asarray((cumulative > targets[:, None]).argmax(axis=1))


def _scaled(logits: Logits, temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.asarray(shifted / temperature[:, None])


def _kept(
    scaled: NDArray[np.float64], weights: NDArray[np.float64], top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> NDArray[np.bool_]:
    size = scaled.shape[1]
    order = np.argsort(-scaled, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    limit = np.where(top_k > 0, np.minimum(top_k, size), size)[:, None]
    ranked[np.arange(size) >= limit] = 0
    cumulative = np.cumsum(ranked, axis=1)
    before = np.zeros_like(cumulative)  # weight of the tokens ranked before
    before[:, 1:] = cumulative[:, :-1]
    keep = (ranked > 0) & ((before < top_p[:, None] * cumulative[:, -1:]) | (top_p >= 1)[:, None])
    keep[:, 0] = True
    kept = np.zeros_like(keep)
    np.put_along_axis(kept, order, keep, axis=1)
    return kept
