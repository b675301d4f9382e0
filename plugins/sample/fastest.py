"""Sampling by the fastest form there is: C++ where the library was compiled, else numpy."""

from __future__ import annotations

from functools import cache

from hybridtrt.plugins.native.library import load_library
from hybridtrt.plugins.sample import native, reference, vectorized
from hybridtrt.plugins.sample.params import Sampled, SampleParams
from hybridtrt.plugins.sample.reference import F32


def sample(logits: F32, params: SampleParams) -> Sampled:
    """Choose one token of each row of `logits` [R, V]; see `reference.sample`."""
    return native.sample(logits, params) if _compiled() else vectorized.sample(logits, params)


def log_normalizer(logits: F32) -> float:
    """See `reference.log_normalizer`, of a row of `logits` [V]."""
    return native.log_normalizer(logits) if _compiled() else reference.log_normalizer(logits)


@cache
def _compiled() -> bool:
    try:
        load_library()
    except ValueError:
        return False
    return True
