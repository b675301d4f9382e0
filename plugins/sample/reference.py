"""Sampling, as defined: vectorised over rows, with a full sort."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.sample.params import Sampled, SampleParams
from hybridtrt.plugins.sample.philox import uniform

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# Beyond these a quotient of float32 may be 0 / 0 or infinity / infinity.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def sample(logits: F32, params: SampleParams) -> Sampled:
    """Choose one token of each row of `logits` [R, V].

    Rows with temperature 0 are greedy. Others follow the order of transformers and TensorRT-LLM: divide by the
    temperature; keep the `top_k` largest; of these keep the shortest run from the largest on whose probability,
    relative to what top-k kept, reaches `top_p` (at least one token); of these keep those that have at least `min_p`
    times the largest probability (arXiv 2407.01082). Ties are ranked by id. The token is the first, in order of ids, at
    which the cumulative probability of what was kept exceeds the row's uniform number. Weights are float32, sums
    float64.
    """
    result = greedy(logits)
    chosen = result.valid & (params.temperature > 0)
    if chosen.any():
        scaled = scale(logits[chosen], params.temperature[chosen, None])
        weights = np.exp(scaled)
        weights[~_kept(scaled, weights, params.top_k[chosen], params.top_p[chosen])] = 0
        weights[weights < params.min_p[chosen, None].astype(np.float32)] = 0  # the largest weight is 1
        result.tokens[chosen] = _pick(weights, uniform(params.seeds[chosen], params.positions[chosen]))
    return result


def greedy(logits: F32) -> Sampled:
    """The largest logit of each row of `logits` [R, V], the lowest id among equals."""
    if len(logits) == 1:  # fewer calls of numpy, whose code the step before has driven out of the caches
        token = int(logits.argmax())
        return Sampled(np.array([token]), np.array([math.isfinite(logits.item(token))]))
    tokens = logits.argmax(axis=1)
    best = logits[np.arange(len(logits)), tokens]
    return Sampled(tokens, np.isfinite(best))  # argmax finds a NaN if there is one


def log_normalizer(logits: F32) -> float:
    """The logarithm of the sum of the exponentials of a row of `logits` [V]; NaN if its maximum is not finite.

    A logit less this number is the natural log-probability of its token.
    """
    best = float(logits.max())
    return best + math.log(np.exp(logits - best).sum(dtype=np.float64)) if math.isfinite(best) else math.nan


def scale(logits: F32, temperature: F64 | float) -> F32:
    """`(logits - max) / temperature` over the last axis, at most 0, in float32."""
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        divisor = np.clip(temperature, SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE).astype(np.float32)
        return np.asarray(shifted / divisor)


def _kept(scaled: F32, weights: F32, top_k: NDArray[np.int64], top_p: F64) -> NDArray[np.bool_]:
    size = scaled.shape[1]
    order = np.argsort(-scaled, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    keep = np.arange(size) < np.where(top_k > 0, top_k, size)[:, None]
    cumulative = np.cumsum(ranked * keep, axis=1, dtype=np.float64)
    before = np.zeros_like(cumulative)  # weight of the tokens that rank higher
    before[:, 1:] = cumulative[:, :-1]
    keep &= (before < top_p[:, None] * cumulative[:, -1:]) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    kept = np.zeros_like(keep)
    np.put_along_axis(kept, order, keep, axis=1)
    return kept


def _pick(weights: F32, uniforms: F64) -> NDArray[np.int64]:
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    targets = np.minimum(uniforms * total, np.nextafter(total, 0))  # the product may round up to the total
    return np.asarray((cumulative > targets[:, None]).argmax(axis=1))
