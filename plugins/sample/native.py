"""Sampling in C++: the definition of `reference`, on the widest instruction set or that of HYBRIDTRT_ISA."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_double, c_int64, c_void_p
from dataclasses import fields
from functools import cache

import numpy as np

from hybridtrt.plugins.native.library import ISAS, chosen_isa, load_library
from hybridtrt.plugins.sample.params import Sampled, SampleParams
from hybridtrt.plugins.sample.reference import F32

# One pointer to all rows: making a pointer takes longer than sampling from a small vocabulary.
_ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seeds", np.uint64),
        ("positions", np.int64),
        ("token", np.int64),
        ("valid", np.int64),
    ]
)
_PARAMS = [field.name for field in fields(SampleParams)]


def sample(logits: F32, params: SampleParams) -> Sampled:
    """Choose one token of each row of `logits` [R, V]; see `reference.sample`. Exponentials may round differently.

    Raises `ValueError` where the library is missing or this machine does not run the instruction set, and `MemoryError`
    where a row does not fit.
    """
    logits = _rows(logits)
    rows = np.empty(len(logits), _ROW)
    for name in _PARAMS:
        rows[name] = getattr(params, name)
    library, isa = _library(), _isa(os.environ.get("HYBRIDTRT_ISA"))
    if library.ht_sample(isa, logits.ctypes.data, logits.shape[1], rows.ctypes.data, len(rows)):
        raise MemoryError(f"no memory to sample from {logits.shape[1]} tokens")
    return Sampled(rows["token"].copy(), rows["valid"] != 0)


def log_normalizer(logits: F32) -> float:
    """As `reference.log_normalizer` of a row of `logits` [V]; raises as `sample` does."""
    row, result = _rows(logits[None]), c_double()
    library, isa = _library(), _isa(os.environ.get("HYBRIDTRT_ISA"))
    if library.ht_log_normalizer(isa, row.ctypes.data, row.shape[1], byref(result)):
        raise MemoryError(f"no memory for a row of {row.shape[1]} logits")
    return result.value


def _rows(logits: F32) -> F32:
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits of shape {logits.shape} have no rows of tokens")
    return np.ascontiguousarray(logits, np.float32)


@cache
def _isa(name: str | None) -> int:
    return ISAS.index(chosen_isa(name))


@cache
def _library() -> ctypes.CDLL:
    library = load_library()
    library.ht_sample.argtypes = [c_int64, c_void_p, c_int64, c_void_p, c_int64]
    library.ht_log_normalizer.argtypes = [c_int64, c_void_p, c_int64, POINTER(c_double)]
    return library
