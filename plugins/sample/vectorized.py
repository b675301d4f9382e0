"""Sampling without a sort of the vocabulary: the definition of `reference`, one row at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.sample.params import Sampled, SampleParams
from hybridtrt.plugins.sample.philox import uniform
from hybridtrt.plugins.sample.reference import F32, greedy, scale

Ids = NDArray[np.int64]

CHUNK = 1 << 17  # logits that are worked on at once, so that they stay in the cache
GROUP = 32  # logits of which only the largest is looked at first
FEW = 1024  # weights that are sorted at once
CLASS_SHIFT = 18  # bits of a float32 below its exponent and the first 5 of its fraction
BLOCK = 512  # weights that are summed before the cumulative sum looks at them one by one


def sample(logits: F32, params: SampleParams) -> Sampled:
    """Choose one token of each row of `logits` [R, V]; see `reference.sample`. Sums may round differently."""
    result = greedy(logits)
    chosen = np.flatnonzero(result.valid & (params.temperature > 0))
    numbers = uniform(params.seeds[chosen], params.positions[chosen]).tolist()
    limits = [field[chosen].tolist() for field in (params.top_k, params.top_p, params.min_p)]
    at_once = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(chosen), at_once):
        rows = chosen[start : start + at_once]
        scaled = scale(logits[rows], params.temperature[rows, None])
        weights = np.exp(scaled)
        stop = start + len(rows)
        columns = (scaled, weights, *(limit[start:stop] for limit in limits), numbers[start:stop])
        result.tokens[rows] = [_choose(*row) for row in zip(*columns, strict=True)]
    return result


def _choose(scaled: F32, weights: F32, top_k: int, top_p: float, min_p: float, number: float) -> int:
    ids = None
    if 0 < top_k < len(scaled):
        ids = largest(scaled, top_k)
        scaled, weights = scaled[ids], weights[ids]
    if top_p < 1:
        kept = _nucleus(scaled, weights, top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if min_p > 0:
        likely = np.flatnonzero(weights >= np.float32(min_p))
        ids = likely if ids is None else ids[likely]
        weights = weights[likely]
    place = _pick(weights, number)
    return place if ids is None else int(ids[place])


def largest(values: F32, count: int) -> Ids:
    """Places of the `count` largest of `values` [V], ascending; of equal ones at the end the first."""
    floor = -np.inf
    if len(values) >= 4 * GROUP * count:
        # As many groups as are asked for have a maximum of at least this one, so the values below it are out.
        maxima = values[: len(values) // GROUP * GROUP].reshape(-1, GROUP).max(axis=1)
        floor = np.partition(maxima, -count)[-count]
    smallest = np.partition(values[values >= floor], -count)[-count]
    places = np.flatnonzero(values >= smallest)
    if len(places) > count:
        tied = np.flatnonzero(values[places] == smallest)
        places = np.delete(places, tied[count - len(places) :])
    return places


def _nucleus(scaled: F32, weights: F32, top_p: float) -> Ids:
    """Places of the shortest run from the largest weight on that holds `top_p` of the total, ascending.

    Weights below (1 - top_p) × total / N add up to less than 1 - top_p of the total, so none of them is in it.
    """
    total = float(weights.sum(dtype=np.float64))
    candidates = np.flatnonzero(weights >= 0.999 * (1 - top_p) * total / len(weights))
    certain, before = candidates[:0], 0.0
    if len(candidates) > FEW:
        certain, candidates, before = _narrow(weights, candidates, top_p * total)
    order = np.argsort(-scaled[candidates], kind="stable")
    cumulative = before + np.cumsum(weights[candidates[order]], dtype=np.float64)
    length = int(np.searchsorted(cumulative, top_p * total)) + 1
    return np.sort(np.concatenate([certain, candidates[order[:length]]]))


def _narrow(weights: F32, candidates: Ids, target: float) -> tuple[Ids, Ids, float]:
    """Candidates that the shortest run of weight `target` holds, those among which it ends, and the weight before them.

    The high bits of a positive float rank as it does, so they part the weights into classes that need no sort.
    """
    weights = weights[candidates]
    classes = weights.view(np.int32) >> CLASS_SHIFT
    sums = np.cumsum(np.bincount(classes, weights)[::-1])
    place = int(np.searchsorted(sums, target))
    last = len(sums) - 1 - place
    return candidates[classes > last], candidates[classes == last], float(sums[place - 1]) if place else 0.0


def _pick(weights: F32, number: float) -> int:
    """The first place at which the cumulative weight exceeds `number` × total."""
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64))
    target = min(number * sums[-1], math.nextafter(sums[-1], 0))
    block = int(np.searchsorted(sums, target, side="right"))
    before = sums[block - 1] if block else 0.0
    cumulative = before + np.cumsum(weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    inside = int(np.searchsorted(cumulative, min(target, math.nextafter(cumulative[-1], 0)), side="right"))
    return block * BLOCK + inside
