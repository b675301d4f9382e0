"""Expert capacity in the Triton language against a plain definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capacity import Case, cases, defined

from hybridtrt.plugins.gpu import dispatch
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel


class OnePageGroup(Case):
    """The kernels see one group's block table."""

    def step(self) -> Step:
        step = super().step()
        step.block_tables.pop("window", None)
        return step


def as_defined(case: Case, block: int = 32) -> None:
    """With blocks of so many pairs; the interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "BLOCK", block)
        weights, numbers, load, overflow = OnePageGroup(**case.__dict__).run("gpu")
    expected = defined(case)
    np.testing.assert_array_equal(weights.numpy(), expected[0])
    np.testing.assert_array_equal(numbers.numpy(), expected[1])
    assert (load.tolist(), overflow.tolist()) == expected[2:]
    assert load.dtype == overflow.dtype == torch.int32


@pytest.mark.parametrize("overflow", ["drop", "next_best"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_it_does_as_defined(overflow: str, data: st.DataObject) -> None:
    as_defined(data.draw(cases(st.just(overflow))))


@pytest.mark.parametrize("hot", [True, False])
def test_more_pairs_than_a_block_and_a_tile(hot: bool) -> None:
    """Many equal weights; with a hot expert, of which all tokens ask."""
    rng = np.random.default_rng(hot)
    tokens, experts = 90, 4
    order = np.argsort(rng.random((tokens, experts)) - hot * np.arange(experts)[::-1] / 2, 1)
    case = Case(
        rows=((40, True), (7, False), (43, True)),
        weights=torch.from_numpy(rng.choice([0.25, 0.5, 0.75], (tokens, experts)).astype(np.float32)),
        order=torch.from_numpy(order),
        top_k=2,
        experts=experts,
        factor=0.75,
        overflow="next_best",
        by_page=False,
    )
    as_defined(case, 16)
    as_defined(replace(case, overflow="drop", by_page=True))


def test_numbers_may_be_int32_and_there_may_be_no_pages() -> None:
    case = Case(((3, False),), torch.rand(3, 2), torch.tensor([[0, 1]] * 3), 1, 2, 1.0, "next_best", False)
    limits = {"top_k": 1, "num_experts": 2, "factor": 1.0, "overflow": "next_best"}
    weights, numbers, load, overflow = kernel("capacity", "gpu")(case.step(), case.weights, case.order.int(), **limits)
    expected = defined(case)
    np.testing.assert_array_equal(weights.numpy(), expected[0])
    np.testing.assert_array_equal(numbers.numpy(), expected[1])
    assert (load.tolist(), overflow.tolist()) == ([2, 1], [1, 0])


def test_what_a_product_exceeds_a_whole_number_by_does_not_count() -> None:
    """1.1 * 50 / 5 is 11.000000000000002 in float64."""
    order = torch.tensor([[0, 1]] * 50)
    case = Case(((50, True),), torch.rand(50, 2), order, 1, 5, 1.1, "drop", False)
    assert case.factor * 50 / 5 > 11
    assert OnePageGroup(**case.__dict__).run("gpu")[2].tolist() == [11, 0, 0, 0, 0]
