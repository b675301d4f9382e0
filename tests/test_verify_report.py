"""How `verify` judges: errors by the spread of the logits, agreement up to ties, and what passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrt.runtime.verify import THRESHOLDS, TIE, PromptReport, VerifyReport, agreeing_tokens, relative_error

TIGHT, WIDE = THRESHOLDS["float32"], THRESHOLDS["bfloat16"]


def report(*prompts: tuple[float, int], threshold: float = TIGHT) -> VerifyReport:
    """Prompts of 8 greedy tokens: logit error, and how many of the tokens agree."""
    return VerifyReport("any", tuple(PromptReport(5, error, 8, agree) for error, agree in prompts), threshold)


@pytest.mark.parametrize(
    ("prompts", "threshold", "passed"),
    [
        ([(0.0, 8), (TIGHT, 8)], TIGHT, True),
        ([(0.0, 8), (1.01 * TIGHT, 8)], TIGHT, False),
        ([(1.01 * TIGHT, 8), (0.0, 8)], TIGHT, False),
        ([(0.0, 8), (float("inf"), 8)], TIGHT, False),
        ([(0.0, 8), (0.0, 7)], TIGHT, False),
        ([(0.1, 8), (0.1, 0)], WIDE, True),  # weights were rounded: tokens may differ
        ([(0.1, 8), (2 * WIDE, 8)], WIDE, False),
    ],
)
def test_what_passes(prompts: list[tuple[float, int]], threshold: float, passed: bool) -> None:
    verdict = report(*prompts, threshold=threshold)
    assert verdict.passed == passed
    assert verdict.logit_error == max(error for error, _ in prompts)
    assert (verdict.greedy_tokens, verdict.greedy_agree) == (16, sum(agree for _, agree in prompts))


@given(st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_errors_are_relative_to_the_spread(scale: float, shift: float) -> None:
    """Neither the unit of the logits nor their mean matters, only how far they lie apart."""
    rng = np.random.default_rng(0)
    expected, noise = rng.standard_normal((2, 6, 50))
    error = relative_error(expected + 1e-2 * noise, expected)
    assert error == pytest.approx(1e-2 * np.abs(noise).max() / expected.std())
    moved, base = scale * (expected + 1e-2 * noise) + shift, scale * expected + shift
    assert relative_error(moved, base) == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_infinitely_wrong(bad: float) -> None:
    good = np.random.default_rng(0).standard_normal((3, 4))
    damaged = good.copy()
    damaged[1, 2] = bad
    with np.errstate(invalid="ignore"):
        assert relative_error(damaged, good) == relative_error(good, damaged) == float("inf")


@pytest.mark.parametrize("first_wrong", [None, 0, 3, 7])
@pytest.mark.parametrize("apart", [1.5, 1e3])  # by how many ties the first wrong token is worse
def test_agreement_counts_to_the_first_token_that_differs(first_wrong: int | None, apart: float) -> None:
    """A token that the oracle likes as well as its best one, but for less than a tie, counts as equal."""
    rng = np.random.default_rng(1)
    expected = rng.standard_normal((8, 20)).astype(np.float32)
    tokens = expected.argmax(-1)
    for row, other in enumerate((tokens + 1) % 20):
        expected[row, other] = expected[row, tokens[row]] - 0.5 * TIE * expected.std()
    tied = (tokens + 1) % 20
    chosen = np.where(np.arange(8) % 2, tied, tokens)
    if first_wrong is not None:  # what comes after a difference says nothing
        chosen[first_wrong] = other = (tokens[first_wrong] + 2) % 20
        expected[first_wrong, other] = expected[first_wrong].max() - apart * TIE * expected.std()
    assert agreeing_tokens(expected, chosen.tolist()) == (8 if first_wrong is None else first_wrong)
