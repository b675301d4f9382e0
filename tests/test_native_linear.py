"""Kernels over panels against float64 of the weights that the panels hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import make_batch, place
from torch import Tensor

from hybridtrt.plugins.experts import reference as experts_reference
from hybridtrt.plugins.linear.packing import pack, unpack
from hybridtrt.plugins.linear.panel_layout import GROUPS
from hybridtrt.plugins.native.library import supported_isas
from hybridtrt.plugins.native.one_op import run_one
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import op_spec

FORMATS = [(form, group) for form, groups in GROUPS.items() for group in groups]
TOLERANCE = {
    "panel_float32": 1e-5,
    "panel_bfloat16": 1e-5,
    "panel_bfloat16_rounded": 1e-5,
    "panel_int8": 1.5e-4,
    "panel_int4": 1.5e-4,
}


def tokens(count: int) -> Step:
    batch = make_batch([(0, 0, count)], [[1] * count], place([count], 16, np.random.default_rng(0)))
    return Step(batch)


def linear(x: Tensor, form: str, group: int, weight: Tensor, bias: Tensor | None = None, threads: int = 2) -> Tensor:
    result: Tensor = run_one(
        op_spec("linear"), tokens(len(x)), x, panel=form, group=group, weight=weight, bias=bias, threads=threads
    )
    return result


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(matrix: Tensor, form: str, group: int) -> Tensor:
    """The weights that the panels stand for, in float64."""
    return unpack(pack(matrix, form, group), form, tuple(matrix.shape), group).double()


def assert_near(found: Tensor, x: Tensor, weight: Tensor, form: str, bias: Tensor | float = 0.0) -> None:
    """Near to the product in float64, on the scale of the result of random numbers: few may happen to cancel."""
    exact = (x.bfloat16() if form.endswith("_rounded") else x).double() @ weight.T + bias
    scale = max(float(exact.abs().max()), float(x.norm(dim=1).max() * weight.norm(dim=1).max()) / x.shape[1] ** 0.5)
    assert (found - exact).abs().max() <= TOLERANCE[form] * scale


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("form", "group"), FORMATS)
@settings(deadline=None, max_examples=12)
@given(
    m=st.sampled_from([1, 2, 3, 5, 7, 8, 13, 40]),
    k=st.sampled_from([1, 2, 15, 31, 33, 129, 300, 777]),
    n=st.sampled_from([1, 15, 16, 17, 45, 80]),
    threads=st.sampled_from([1, 2, 3]),
    biased=st.booleans(),
)
def test_products_are_those_of_float64(
    isa: str, form: str, group: int, m: int, k: int, n: int, threads: int, biased: bool
) -> None:
    x, weight, bias = numbers(m, k), numbers(n, k, seed=1), numbers(n, seed=2) if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDTRT_ISA", isa)
        found = linear(x, form, group, weight, bias, threads)
    assert_near(found, x, stored(weight, form, group), form, 0.0 if bias is None else bias.double())


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_a_row_alone_is_the_row_among_others(isa: str, form: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDTRT_ISA", isa)
    x, weight, bias = numbers(40, 645), numbers(45, 645, seed=1), numbers(45, seed=2)
    alone = torch.cat([linear(row[None], form, group, weight, bias) for row in x])
    for m in (2, 3, 6, 8, 11, 16, 40):
        assert torch.equal(linear(x[:m], form, group, weight, bias, threads=m % 2 + 1), alone[:m])


@pytest.mark.parametrize("form", GROUPS)
def test_many_rows_pass_in_blocks(form: str) -> None:
    x, weight = numbers(800, 530), numbers(33, 530, seed=1)
    group = GROUPS[form][0]
    found = linear(x, form, group, weight)
    assert_near(found, x, stored(weight, form, group), form)
    assert torch.equal(found[-7:], linear(x[-7:], form, group, weight))


@pytest.mark.parametrize(("form", "group"), [("panel_int8", 0), ("panel_int4", 64)])
def test_extremes_of_integers(form: str, group: int) -> None:
    x = torch.full((3, 256), 1e20)
    x[1] = 0
    x[2, 5] = float("inf")
    weight = torch.ones(17, 256)
    found = linear(x, form, group, weight)
    assert_near(found[:2], x[:2], stored(weight, form, group), form)
    assert found[2].isnan().all()  # is seen, not silently finite


@pytest.mark.parametrize("isa", supported_isas())
@settings(deadline=None, max_examples=25)
@given(
    form=st.sampled_from(FORMATS),
    shape=st.tuples(st.sampled_from([1, 2, 9, 40]), st.integers(1, 4), st.sampled_from([1, 3, 17])),
    sizes=st.sampled_from([(6, 5), (33, 18), (130, 70)]),
    gated=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_experts_are_those_of_float64(
    isa: str,
    form: tuple[str, int],
    shape: tuple[int, int, int],
    sizes: tuple[int, int],
    gated: bool,
    threads: int,
    seed: int,
) -> None:
    (count, choices, experts), (hidden, inner) = shape, sizes
    up = numbers(experts, (2 if gated else 1) * inner, hidden, seed=seed)
    down = numbers(experts, hidden, inner, seed=seed + 1)
    biases = {"up_bias": numbers(*up.shape[:2]), "down_bias": numbers(experts, hidden)}
    x, scales = numbers(count, hidden), numbers(count, choices)
    # One number beyond the experts stands for none.
    chosen = torch.randint(0, experts + 1, (count, choices), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"activation": "silu", "gated": gated, "clamp": 1.5 if gated else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDTRT_ISA", isa)
        run = partial(run_one, op_spec("experts"), panel=form[0], group=form[1], up=up, down=down, **biases, **options)
        found = run(tokens(count), x, scales, chosen, threads=threads)
        alone = run(tokens(1), x[-1:], scales[-1:], chosen[-1:], threads=2)
    exact = experts_reference.experts(
        tokens(count),
        x.double(),
        scales.double(),
        chosen,
        up=stored(up, *form),
        down=stored(down, *form),
        **{name: bias.double() for name, bias in biases.items()},
        **options,
    )
    tolerance = 2**-8 if form[0].endswith("_rounded") else TOLERANCE[form[0]]  # activated numbers are rounded, too
    assert (found - exact).abs().max() <= 3 * tolerance * max(exact.abs().max(), 1)
    assert torch.equal(found[-1:], alone)
