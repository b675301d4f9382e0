"""Sampling in C++ on every instruction set: the definition to the last token, where rounding leaves one."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridtrt.plugins.native.library import supported_isas
from hybridtrt.plugins.sample import Sampled, SampleParams, fastest, native, reference
from hybridtrt.plugins.sample.philox import uniform

F32 = NDArray[np.float32]
ISAS = pytest.mark.parametrize("isa", supported_isas())
SIZES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 640, 1000, 3000]
TOP_K = [0, 0, 1, 2, 5, 50, 63, 64, 65, 999, 3000, 10_000]
TOP_P = [0.0, 1e-12, 0.05, 0.5, 0.9, 0.999, 1 - 1e-15, 1.0, 1.0]
MIN_P = [0.0, 0.0, 0.0, 1e-40, 0.013, 0.2, 1.0]
ROUNDING = 1e-6  # of the total: exponentials and sums differ by less


def run(isa: str, logits: F32, params: SampleParams) -> Sampled:
    with patch.dict(os.environ, HYBRIDTRT_ISA=isa):
        return native.sample(logits, params)


def draw_params(rng: np.random.Generator, rows: int, temperatures: list[float]) -> SampleParams:
    """Of every kind, each row its own."""
    return SampleParams(
        temperature=rng.choice(temperatures, rows),
        top_k=rng.choice(TOP_K, rows),
        top_p=rng.choice(TOP_P, rows),
        min_p=rng.choice(MIN_P, rows),
        seeds=rng.integers(0, 2**64, rows, np.uint64, endpoint=False),
        positions=rng.integers(0, 2**40, rows),
    )


def rows_of(params: SampleParams, rows: NDArray[np.int64]) -> SampleParams:
    return SampleParams(**{name: values[rows] for name, values in vars(params).items()})


def random_logits(rng: np.random.Generator, rows: int, size: int, kind: str) -> F32:
    logits = rng.standard_normal((rows, size)) * {"flat": 0.1, "steep": 20, "huge": 2e38}.get(kind, 3)
    if kind == "tied":
        logits = np.round(logits)
    if kind == "near":  # apart by a few units in the last place
        logits = 1 + np.round(logits) * 2**-23
    if kind == "forbidden":
        logits[:, rng.random(size) < 0.9] = -np.inf
        logits[:, rng.integers(size)] = 0
    with np.errstate(over="ignore"):
        return np.clip(logits.astype(np.float32), -np.inf, np.finfo(np.float32).max)


def possible(scaled: F32, params: SampleParams, row: int) -> set[int]:
    """The tokens that the definition chooses with exact exponentials, each limit and number moved by `ROUNDING`."""
    exact = np.exp(scaled.astype(np.float64))
    order = np.argsort(-scaled, kind="stable")[: params.top_k[row] or None]
    ranked = exact[order]
    total = ranked.sum()
    before, top_p, min_p = np.cumsum(ranked) - ranked, params.top_p[row], float(np.float32(params.min_p[row]))
    counts = []
    for by in (-ROUNDING, ROUNDING):
        run_of = len(ranked) if top_p >= 1 else np.count_nonzero(before < (top_p + by) * total)
        likely = np.count_nonzero((ranked >= min_p * (1 + by)) | (ranked == ranked[0]))  # the best weighs exactly 1
        counts.append(max(1, min(run_of, likely)))
    number, found = uniform(params.seeds[row : row + 1], params.positions[row : row + 1])[0], set()
    for count in range(min(counts), max(counts) + 1):
        ids = np.sort(order[:count])
        ends = np.cumsum(exact[ids])
        begins = np.concatenate([[0.0], ends[:-1]])
        target = number * ends[-1]
        near = (begins <= target + ROUNDING * ends[-1]) & (target - ROUNDING * ends[-1] <= ends) & (exact[ids] > 1e-30)
        found |= set(ids[near].tolist())
    return found


@ISAS
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    size=st.sampled_from(SIZES),
    kind=st.sampled_from(["usual", "flat", "steep", "huge", "tied", "near", "forbidden"]),
    seed=st.integers(0, 2**32),
)
def test_a_row_follows_the_definition(isa: str, size: int, kind: str, seed: int) -> None:
    """Its token is that of the reference, or a limit or the row's number lies within rounding of the border."""
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 24, size, kind)
    params = draw_params(rng, 24, [0, 1e-300, 1e-3, 0.3, 1, 1, 5, 1e6, 1e300])
    found, expected = run(isa, logits, params), reference.sample(logits, params)
    np.testing.assert_array_equal(found.valid, expected.valid)
    for row in np.flatnonzero(found.tokens != expected.tokens):
        assert found.valid[row]
        assert params.temperature[row] > 0
        among = possible(reference.scale(logits[row], params.temperature[row]), params, row)
        assert {int(found.tokens[row]), int(expected.tokens[row])} <= among


def test_few_rows_are_near_a_border() -> None:
    """What the test above allows is little: of ordinary rows hardly one has two possible tokens."""
    rng = np.random.default_rng(0)
    logits, params = random_logits(rng, 400, 640, "usual"), draw_params(rng, 400, [0.3, 1, 5])
    scaled = reference.scale(logits, params.temperature[:, None])
    among = [possible(scaled[row], params, row) for row in range(400)]
    tokens = reference.sample(logits, params).tokens
    assert all(token in some for token, some in zip(tokens.tolist(), among, strict=True))
    assert sum(len(some) > 1 for some in among) < 8


@ISAS
@settings(max_examples=80, deadline=None, derandomize=True)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
def test_weights_that_are_exact_give_the_same_token(isa: str, size: int, seed: int) -> None:
    """Weights are 1 or 0, so no sum rounds: ties, their cut by id, and every bit of the numbers."""
    rng = np.random.default_rng(seed)
    logits = rng.choice(np.array([5, -500, -np.inf], np.float32), (24, size), p=[0.7, 0.2, 0.1])
    logits[:, rng.integers(size)] = 5
    params = draw_params(rng, 24, [0.3, 1, 2])
    np.testing.assert_array_equal(run(isa, logits, params).tokens, reference.sample(logits, params).tokens)


@ISAS
@pytest.mark.parametrize("size", [64, 4096, 5000])
def test_every_token_of_equal_ones(isa: str, size: int) -> None:
    """The uniform numbers are those of philox.py."""
    params = draw_params(np.random.default_rng(0), 500, [1.0])
    params = replace(params, top_k=np.zeros(500, int), top_p=np.ones(500), min_p=np.zeros(500))
    tokens = run(isa, np.ones((500, size), np.float32), params).tokens
    np.testing.assert_array_equal(tokens, np.floor(uniform(params.seeds, params.positions) * size))


@ISAS
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.8), (40, 0.8)])
def test_frequencies(isa: str, top_k: int, top_p: float) -> None:
    count, size = 20_000, 150
    logits = np.random.default_rng(5).standard_normal(size).astype(np.float32) * 2
    ones = np.ones(count)
    params = SampleParams(ones * 1.5, ones.astype(int) * top_k, ones * top_p, ones * 0, ones.astype(np.uint64),
                          np.arange(count))  # fmt: skip
    found = np.bincount(run(isa, np.tile(logits, (count, 1)), params).tokens, minlength=size)
    weights = np.exp(logits.astype(float) / 1.5)
    order = np.argsort(-weights)
    weights[order[top_k or size :]] = 0
    kept = np.cumsum(weights[order]) - weights[order] < top_p * weights.sum()
    weights[order[~kept]] = 0
    assert (found[weights == 0] == 0).all()
    expected = (weights / weights.sum() * count)[weights > 0]
    chi_square = ((found[weights > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


@ISAS
def test_a_row_is_the_same_alone_and_in_any_order(isa: str) -> None:
    rng = np.random.default_rng(2)
    logits = np.concatenate([random_logits(rng, 30, 1000, kind) for kind in ("usual", "flat", "tied")])
    params = draw_params(rng, 90, [0, 0.5, 1, 3])
    together, order = run(isa, logits, params).tokens, rng.permutation(90)
    np.testing.assert_array_equal(run(isa, logits[order], rows_of(params, order)).tokens, together[order])
    for row in range(90):
        alone = run(isa, logits[row : row + 1], rows_of(params, np.array([row])))
        assert alone.tokens[0] == together[row]
    wide = np.full((90, 1003), np.nan, np.float32)
    wide[:, 2:1002] = logits  # rows that lie apart
    np.testing.assert_array_equal(run(isa, wide[:, 2:1002], params).tokens, together)


@ISAS
@pytest.mark.parametrize("size", [1, 17, 64, 200])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_reported(isa: str, size: int, bad: float, temperature: float) -> None:
    logits = random_logits(np.random.default_rng(size), size + 2, size, "usual")
    logits[np.arange(size), np.arange(size)] = bad  # at each place
    logits[size] = -np.inf
    params = draw_params(np.random.default_rng(0), size + 2, [temperature])
    found = run(isa, logits, params)
    assert found.valid.tolist() == [False] * (size + 1) + [True]
    np.testing.assert_array_equal(found.tokens[: size + 1], logits[: size + 1].argmax(axis=1))


@ISAS
@pytest.mark.parametrize("size", SIZES)
def test_greedy_and_the_normalizer(isa: str, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = np.concatenate([random_logits(rng, 5, size, kind) for kind in ("usual", "tied", "forbidden", "steep")])
    params = draw_params(rng, len(logits), [0, math.nan])
    np.testing.assert_array_equal(run(isa, logits, params).tokens, reference.greedy(logits).tokens)
    with patch.dict(os.environ, HYBRIDTRT_ISA=isa):
        for row in logits:
            exact = np.exp(row.astype(float) - row.max()).sum()
            assert native.log_normalizer(row) == pytest.approx(float(row.max()) + math.log(exact), rel=1e-6, abs=1e-6)
        for bad in (np.nan, np.inf):
            row[-1] = bad
            assert math.isnan(native.log_normalizer(row))
        assert math.isnan(native.log_normalizer(np.full(size, -np.inf, np.float32)))


def test_what_is_refused() -> None:
    params = draw_params(np.random.default_rng(0), 2, [1])
    with pytest.raises(ValueError, match="instruction set 'avx1024' is not known; known: base, avx2, avx512"):
        run("avx1024", np.zeros((2, 5), np.float32), params)
    for shape in ((2, 0), (5,)):
        with pytest.raises(ValueError, match=r"logits of shape .* have no rows of tokens"):
            native.sample(np.zeros(shape, np.float32), params)
    with pytest.raises(ValueError, match="broadcast"):
        native.sample(np.zeros((3, 5), np.float32), params)


@pytest.mark.parametrize("compiled", [True, False])
def test_numpy_where_there_is_no_library(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ValueError("the library is missing")

    used = {True: [], False: []}  # type: dict[bool, list[int]]
    for module, kind in ((native, True), (fastest.vectorized, False)):
        original = module.sample
        monkeypatch.setattr(module, "sample", lambda *x, f=original, k=kind: used[k].append(1) or f(*x))
    if not compiled:
        monkeypatch.setattr(fastest, "load_library", missing)
    fastest._compiled.cache_clear()
    try:
        rng = np.random.default_rng(1)
        logits, params = random_logits(rng, 8, 640, "usual"), draw_params(rng, 8, [1.0])
        np.testing.assert_array_equal(fastest.sample(logits, params).tokens, reference.sample(logits, params).tokens)
        assert fastest.log_normalizer(logits[0]) == pytest.approx(reference.log_normalizer(logits[0]), rel=1e-6)
    finally:
        fastest._compiled.cache_clear()
    assert used == {compiled: [1], not compiled: []}
