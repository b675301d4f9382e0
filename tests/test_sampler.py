"""Sampling: the definition row by row, its distribution, its seeds, and rows that do not know each other."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridtrt.plugins.sample import SampleParams, cpu, reference
from hybridtrt.plugins.sample.philox import philox, uniform
from hybridtrt.plugins.sample.reference import greedy, log_probs
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.sampler import choose, temperature_of
from hybridtrt.runtime.sequence import Sequence

WALKERS = [reference, cpu]


def make_params(rows: int, temperature: float = 1, top_k: int = 0, top_p: float = 1, seed: int = 0) -> SampleParams:
    return SampleParams(
        temperature=np.full(rows, float(temperature)),
        top_k=np.full(rows, top_k),
        top_p=np.full(rows, float(top_p)),
        seeds=np.full(rows, seed, np.uint64),
        positions=np.arange(rows),
    )


def plain(logits: list[float], temperature: float, top_k: int, top_p: float, number: float) -> int:
    """The definition for one row, in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    kept = ranked[: top_k or len(ranked)]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    target = number * mass
    for token in sorted(nucleus):
        target -= weights[token]
        if target < 0:
            return token
    raise AssertionError("nothing was chosen")


def draw(walker: ModuleType, logits: list[float], count: int, **limits: float) -> NDArray[np.int64]:
    """How often each token is drawn at `count` positions."""
    rows = np.tile(np.array(logits, np.float32), (count, 1))
    tokens = walker.sample(rows, make_params(count, **limits)).tokens
    return np.bincount(tokens, minlength=len(logits))


def test_philox_known_answers() -> None:
    """The vectors that are published with Random123 for philox4x32-10."""
    cases = [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        words = philox(*(tuple(np.array(numbers, np.uint64)[:, None]) for numbers in (counter, key)))
        assert [int(word[0]) for word in words] == expected


def test_uniform_numbers_are_even_and_differ_by_seed_and_position() -> None:
    numbers = uniform(np.full(20_000, 7, np.uint64), np.arange(20_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    assert chi_square(np.histogram(numbers, 20, (0, 1))[0], np.full(20, 0.05)) < 45  # 19 degrees, p = 0.0007
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    others = [uniform(np.array([seed], np.uint64), np.array([0]))[0] for seed in (7, 8, 7 + 2**32, 2**64 - 1)]
    assert len({numbers[0], *others}) == 4  # seed 7 twice


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("walker", WALKERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_row_follows_the_plain_definition(walker: ModuleType, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 17, 600]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = rng.standard_normal((4, size)).astype(np.float32) * 3
    if data.draw(st.booleans()):
        logits = np.round(logits)  # ties
    if data.draw(st.booleans()):
        logits[:, rng.random(size) < 0.5] = -np.inf
        logits[:, 0] = 0
    temperature = data.draw(st.sampled_from([0.1, 0.7, 1.0, 5.0]))
    top_k = data.draw(st.sampled_from([0, 1, 2, 5, 50, 10_000]))
    top_p = data.draw(st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]))
    params = make_params(4, temperature, top_k, top_p, seed=data.draw(st.integers(0, 2**64 - 1)))
    tokens = walker.sample(logits, params).tokens
    numbers = uniform(params.seeds, params.positions)
    for row in range(4):
        assert tokens[row] == plain(logits[row].tolist(), temperature, top_k, top_p, numbers[row])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([50, 513, 1024, 9000]), ties=st.booleans())
def test_the_fast_form_chooses_as_the_definition_does(seed: int, size: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((32, size)).astype(np.float32) * 3
    params = SampleParams(
        temperature=rng.choice([0, 0.3, 1, 3.0], 32),
        top_k=rng.choice([0, 1, 2, 20, 40, 3000], 32),
        top_p=rng.choice([0, 0.1, 0.9, 0.999, 1], 32),
        seeds=rng.integers(0, 2**63, 32).astype(np.uint64),
        positions=rng.integers(0, 10_000, 32),
    )
    logits = np.round(logits, 1) if ties else logits
    assert np.array_equal(cpu.sample(logits, params).tokens, reference.sample(logits, params).tokens)


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"temperature": 2.0, "top_k": 3}, [0, 2, 5]),
        ({"top_p": 0.7}, [0, 2, 5]),
        ({"top_k": 3, "top_p": 0.7}, [2, 5]),  # of what top-k kept, two hold 0.7
        ({"temperature": 3.0, "top_p": 0.7}, [0, 1, 2, 5, 6]),  # the temperature comes first
    ],
)
def test_distribution(walker: ModuleType, limits: dict[str, float], kept: list[int]) -> None:
    probabilities = np.array([0.16, 0.1, 0.3, 0.02, 0.04, 0.25, 0.08, 0.05])
    counts = draw(walker, np.log(probabilities).tolist(), 20_000, **limits)
    weights = np.zeros(8)
    weights[kept] = probabilities[kept] ** (1 / limits.get("temperature", 1))
    assert chi_square(counts, weights / weights.sum()) < 25  # at most 7 degrees, p = 0.0008


@pytest.mark.parametrize("walker", WALKERS)
def test_temperature_tends_to_greedy_and_to_even(walker: ModuleType) -> None:
    logits = [1.0, 1.5, 1.4, 0.0]
    for temperature in (1e-3, 1e-30, 1e-300):
        assert draw(walker, logits, 100, temperature=temperature).tolist() == [0, 100, 0, 0]
    counts = draw(walker, logits, 10_000, temperature=1e6)
    assert chi_square(counts, np.full(4, 0.25)) < 17


@pytest.mark.parametrize("walker", WALKERS)
def test_rows_do_not_depend_on_each_other(walker: ModuleType) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 300)).astype(np.float32)
    fields = {
        "temperature": rng.choice([0, 0.5, 1.0], 40),
        "top_k": rng.choice([0, 5], 40),
        "top_p": rng.choice([0.8, 1], 40),
        "seeds": rng.integers(0, 2**63, 40).astype(np.uint64),
        "positions": rng.integers(0, 1000, 40),
    }
    together = walker.sample(logits, SampleParams(**fields)).tokens
    order = rng.permutation(40)
    shuffled = walker.sample(logits[order], SampleParams(**{name: value[order] for name, value in fields.items()}))
    assert np.array_equal(shuffled.tokens, together[order])
    for row in range(40):
        alone = SampleParams(**{name: value[row : row + 1] for name, value in fields.items()})
        assert walker.sample(logits[row : row + 1], alone).tokens[0] == together[row]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([[0, 2, 2, 1], [3, 3, 3, 3], [-np.inf, -5, -np.inf, -5]], np.float32)
    assert greedy(logits).tokens.tolist() == [1, 0, 1]


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("bad", [[0, np.nan, 1], [np.nan] * 3, [-np.inf] * 3, [0, np.inf, 1]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_finite_maximum_is_reported_and_the_others_are_not(
    walker: ModuleType, bad: list[float], temperature: float
) -> None:
    logits = np.array([[0, 0, 9], bad, [9, 0, 0]], np.float32)
    result = walker.sample(logits, make_params(3, temperature, top_p=0.5))
    assert result.valid.tolist() == [True, False, True]
    assert result.tokens[[0, 2]].tolist() == [2, 0]


def test_log_probs_are_those_of_the_model() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32) * 10
    tokens = np.array([0, 999, 5, 7, 7])
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.abs(log_probs(logits, tokens) - expected[np.arange(5), tokens]).max() < 1e-5


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({}, 0),
        ({"temperature": 0.0, "top_k": 5}, 0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "top_k": 1}, 0),
        ({"temperature": 0.7, "top_p": 0.0}, 0),
        ({"top_k": 0, "top_p": 1.0}, 0),
        ({"top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
    ],
)
def test_what_is_greedy(params: dict[str, float], temperature: float) -> None:
    assert temperature_of(SamplingParams(**params)) == temperature


def test_a_batch_mixes_greedy_and_sampled_rows() -> None:
    logits = np.random.default_rng(3).standard_normal((6, 100)).astype(np.float32)
    kinds = [
        SamplingParams(return_log_probs=True),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(top_k=3, seed=2**64 - 1, return_log_probs=True),
    ]
    sequences = [
        Sequence(Request(str(i), (1, 2), kind), np.array([1, 2], np.int32), kind.seed or 0, temperature_of(kind) == 0)
        for i, kind in enumerate(kinds * 2)
    ]
    logits[5, 3] = np.nan
    choice = choose(logits, sequences)
    assert choice.valid == [True] * 5 + [False]
    assert [math.isnan(value) for value in choice.log_probs] == [False, True, False, False, True, True]
    for row in range(5):
        alone = choose(logits[row : row + 1], sequences[row : row + 1])
        assert alone.tokens[0] == choice.tokens[row]
    assert choice.tokens[0] == logits[0].argmax()
    moved = replace(kinds[1], seed=6)
    others = {choose(logits[1:2], [replace_params(sequences[1], moved, seed)]).tokens[0] for seed in range(20)}
    assert len(others) > 3


def replace_params(sequence: Sequence, params: SamplingParams, seed: int) -> Sequence:
    return Sequence(replace(sequence.request, params=params), sequence.prompt, seed, greedy=False)
