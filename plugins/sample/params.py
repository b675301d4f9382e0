"""Operands and results of sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SampleParams:
    """How each of `R` rows is sampled. A row with temperature 0 is greedy.

    `positions` are the places of the sampled tokens in their sequences: with the seed they determine the random number.
    """

    temperature: NDArray[np.float64]  # [R], >= 0
    top_k: NDArray[np.int64]  # [R], 0: no limit
    top_p: NDArray[np.float64]  # [R], in 0..1, 1: no limit
    min_p: NDArray[np.float64]  # [R], in 0..1, 0: no limit
    seeds: NDArray[np.uint64]  # [R]
    positions: NDArray[np.int64]  # [R]


@dataclass(frozen=True)
class Sampled:
    """One token a row. Where `valid` is false the row held a NaN or no finite maximum, and the token means nothing."""

    tokens: NDArray[np.int64]  # [R]
    valid: NDArray[np.bool_]  # [R]
