"""Recurrences, convolutions and routers in C++ against their definitions in float64, at sizes that fit no vector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridtrt.plugins.native.library import supported_isas
from hybridtrt.plugins.native.one_op import run_one
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel, op_spec
from hybridtrt.plugins.step import StepBatch

ISAS = pytest.mark.parametrize("isa", supported_isas())
LENGTHS = st.lists(st.sampled_from([1, 2, 3, 7, 8, 9, 31, 33, 65]), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-11}  # of a state, relative to its largest number
Tensors = dict[str, Tensor]


@contextmanager
def running(isa: str) -> Iterator[None]:
    with patch.dict(os.environ, HYBRIDTRT_ISA=isa):
        yield


def step_of(lengths: list[int], positions: list[int] | None = None) -> Step:
    """Row b reads slot b + 1 and writes slot len(lengths) + b + 1."""
    rows = len(lengths)
    starts = positions or [0] * rows
    return Step(
        StepBatch(
            input_ids=np.zeros(sum(lengths), np.int32),
            positions=np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(
                np.int32
            ),
            cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
            context_lens=np.array(starts, np.int32),
            state_src=np.arange(1, rows + 1, dtype=np.int32),
            state_dst=np.arange(rows + 1, 2 * rows + 1, dtype=np.int32),
            logits_indices=np.zeros(0, np.int32),
        )
    )


def pool(rows: int, dtype: str, *shape: int) -> Tensor:
    """States of the slots that rows read; the others are NaN."""
    state = torch.full((2 * rows + 1, *shape), torch.nan)
    state[1 : rows + 1] = torch.randn(rows, *shape)
    return state.to(getattr(torch, dtype))


def assert_near(found: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= tolerance * max(float(exact.abs().max()), 1e-30)


def check(
    op: str, isa: str, lengths: list[int], inputs: list[Tensor], weights: Tensors, state: Tensor, threads: int,
    positions: list[int] | None = None, **attributes: Any,
) -> None:  # fmt: skip
    """Outputs and states are those of the definition, and a row of one token is the same alone."""
    rows = len(lengths)
    step = step_of(lengths, positions)
    exact_state = state.double()
    exact = kernel(op, "reference")(
        step,
        *(x.double() for x in inputs),
        **{k: w.double() for k, w in weights.items()},
        state=exact_state,
        **attributes,
    )
    with running(isa):
        mine = state.clone()
        found = run_one(op_spec(op), step, *inputs, **weights, state=mine, **attributes, threads=threads)
        assert_near(found, exact)
        name = str(state.dtype).removeprefix("torch.")
        assert_near(mine[rows + 1 :], exact_state[rows + 1 :], ROUNDING[name])
        assert torch.equal(mine[1 : rows + 1], state[1 : rows + 1])
        assert mine[0].isnan().all()
        for row in [row for row in range(rows) if lengths[row] == 1]:
            at = slice(int(step.cu_seqlens[row]), int(step.cu_seqlens[row + 1]))
            alone = torch.cat([state[[0, row + 1]], state[:1]])
            lone_step = step_of([1], positions and [positions[row]])
            lone = run_one(op_spec(op), lone_step, *(x[at] for x in inputs), **weights, state=alone, **attributes)
            assert torch.equal(lone, found[at])
            assert torch.equal(alone[2], mine[rows + 1 + row])


@ISAS
@pytest.mark.parametrize("dtype", ROUNDING)
@settings(max_examples=8, deadline=None)
@given(
    lengths=LENGTHS,
    groups=st.sampled_from([1, 3]),
    size=st.sampled_from([1, 5, 16, 37, 70]),
    n=st.sampled_from([1, 3, 8, 16, 17, 64]),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_selective_scan(
    isa: str, dtype: str, lengths: list[int], groups: int, size: int, n: int, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tokens, channels = sum(lengths), groups * size
    inputs = [torch.randn(tokens, channels), torch.randn(tokens, channels) * 3]
    inputs += [torch.randn(tokens, groups, n), torch.randn(tokens, groups, n)]
    weights = {"A_log": torch.randn(channels, n) * 2, "D": torch.randn(channels), "dt_bias": torch.randn(channels) - 2}
    check("selective_scan", isa, lengths, inputs, weights, pool(len(lengths), dtype, channels, n), threads)


@ISAS
def test_selective_scan_that_fades_not_at_all_or_at_once(isa: str) -> None:
    """Steps from 1e-9 to 1e9, over more tokens than a tile: off by no more than a few roundings of each token."""
    tokens, channels, n = 300, 9, 5
    torch.manual_seed(0)
    step_size = torch.logspace(-9, 9, channels)
    dt = torch.where(step_size > 20, step_size, step_size.double().expm1().log().float()).expand(tokens, channels)
    inputs = [torch.ones(tokens, channels), dt.contiguous(), torch.ones(tokens, 1, n), torch.ones(tokens, 1, n)]
    weights = {"A_log": torch.linspace(-3, 3, n).expand(channels, n), "D": torch.zeros(channels)}
    weights["dt_bias"] = torch.zeros(channels)
    state = torch.ones(3, channels, n)
    exact_state = state.double()
    exact = kernel("selective_scan", "reference")(
        step_of([tokens]),
        *(x.double() for x in inputs),
        **{k: w.double() for k, w in weights.items()},
        state=exact_state,
    )
    with running(isa):
        found = run_one(op_spec("selective_scan"), step_of([tokens]), *inputs, **weights, state=state)
    for channel in range(channels):
        assert_near(found[:, channel], exact[:, channel], tokens * 2**-22)
        assert_near(state[2, channel], exact_state[2, channel], tokens * 2**-22)


@ISAS
@pytest.mark.parametrize("dtype", ROUNDING)
@settings(max_examples=8, deadline=None)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([1, 2, 3]),
    width=st.sampled_from([1, 3, 8, 21, 67]),
    threads=st.sampled_from([1, 2]),
    fresh=st.booleans(),
    seed=SEEDS,
)
def test_rg_lru(
    isa: str, dtype: str, lengths: list[int], heads: int, width: int, threads: int, fresh: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    channels = heads * width
    square, line = (heads, width, width), (channels,)
    shapes = {
        "input_gate": square,
        "input_bias": line,
        "recurrence_gate": square,
        "recurrence_bias": line,
        "decay": line,
    }
    weights = {
        name: torch.randn(shape) / (len(shape) * width**0.5 if len(shape) > 1 else 1) for name, shape in shapes.items()
    }
    weights["decay"] = weights["decay"] * 6  # from a decay of all to one of nearly nothing
    positions = [0 if fresh and row % 2 == 0 else 5 for row in range(len(lengths))]
    inputs = [torch.randn(sum(lengths), channels)]
    check("rg_lru", isa, lengths, inputs, weights, pool(len(lengths), dtype, channels), threads, positions)


@ISAS
@pytest.mark.parametrize("dtype", ROUNDING)
@settings(max_examples=10, deadline=None)
@given(
    lengths=LENGTHS,
    channels=st.sampled_from([1, 7, 64, 83, 130]),
    width=st.integers(2, 8),
    activation=st.sampled_from([None, "silu"]),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_depthwise_convolution(
    isa: str, dtype: str, lengths: list[int], channels: int, width: int, activation: str | None, bias: bool,
    threads: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    weights = {"weight": torch.randn(channels, width)} | ({"bias": torch.randn(channels)} if bias else {})
    inputs, state = [torch.randn(sum(lengths), channels)], pool(len(lengths), dtype, channels, width - 1)
    check("causal_conv", isa, lengths, inputs, weights, state, threads, activation=activation)


@ISAS
@pytest.mark.parametrize("dtype", ROUNDING)
@settings(max_examples=8, deadline=None)
@given(
    lengths=LENGTHS,
    groups=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 3, 8, 19]),
    width=st.integers(2, 5),
    activation=st.sampled_from([None, "silu"]),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_grouped_convolution(
    isa: str, dtype: str, lengths: list[int], groups: int, size: int, width: int, activation: str | None, bias: bool,
    threads: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    channels = groups * size
    weights = {"weight": torch.randn(channels, size, width)} | ({"bias": torch.randn(channels)} if bias else {})
    inputs, state = [torch.randn(sum(lengths), channels)], pool(len(lengths), dtype, channels, width - 1)
    check("causal_conv", isa, lengths, inputs, weights, state, threads, activation=activation)


ROUTING = st.fixed_dictionaries(
    {
        "scoring": st.sampled_from(["softmax", "softmax_topk", "sigmoid"]),
        "renormalize": st.booleans(),
        "renormalize_eps": st.sampled_from([0.0, 1e-6]),
        "scaling": st.sampled_from([1.0, 2.5]),
        "group_score": st.sampled_from(["top2", "max"]),
    }
)


def route(isa: str, logits: Tensor, threads: int = 1, **attributes: Any) -> tuple[Tensor, Tensor]:
    with running(isa):
        weights, experts = run_one(op_spec("router"), step_of([len(logits)]), logits, threads=threads, **attributes)
    return weights, experts


@ISAS
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    groups=st.sampled_from([1, 2, 5]),
    size=st.sampled_from([2, 3, 8, 13]),
    biased=st.booleans(),
    attributes=ROUTING,
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
    data=st.data(),
)
def test_router(
    isa: str, tokens: int, groups: int, size: int, biased: bool, attributes: dict[str, Any], threads: int, seed: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * size))
    logits = torch.randn(tokens, groups * size) * 3
    named = {**attributes, "top_k": top_k, "num_groups": groups, "top_groups": top_groups}
    bias = {"selection_bias": torch.randn(groups * size)} if biased else {}
    exact = {name: value.double() for name, value in bias.items()}
    weights, experts = kernel("router", "reference")(step_of([tokens]), logits.double(), **exact, **named)
    found, chosen = route(isa, logits, threads, **bias, **named)
    assert torch.equal(chosen, experts)
    assert_near(found, weights)


@ISAS
@settings(max_examples=20, deadline=None)
@given(
    experts=st.sampled_from([2, 7, 16, 33]), jitter=st.sampled_from([0.0, 0.01, 0.3, 5.0]), seed=SEEDS, data=st.data()
)
def test_sparsemixer(isa: str, experts: int, jitter: float, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    logits, top_k = torch.randn(5, experts), data.draw(st.integers(1, experts - 1))
    named = {"scoring": "sparsemixer", "top_k": top_k, "jitter_eps": jitter}
    weights, chosen = kernel("router", "reference")(step_of([5]), logits.double(), **named)
    found, mine = route(isa, logits, **named)
    assert torch.equal(mine, chosen)
    assert_near(found, weights)


@ISAS
@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
def test_among_equal_experts_the_lower_number_comes_first(isa: str, scoring: str) -> None:
    logits = torch.zeros(3, 21)
    logits[1, [4, 9, 17]] = 1.0
    logits[2, :] = -torch.inf  # no score at all: still experts of their own
    logits[2, 20] = 0.0
    weights, experts = route(isa, logits, top_k=4, scoring=scoring)
    assert experts.tolist() == [[0, 1, 2, 3], [4, 9, 17, 0], [20, 0, 1, 2]]
    assert weights[0].unique().numel() == 1
    _, grouped = route(isa, torch.zeros(1, 20), top_k=6, scoring=scoring, num_groups=5, top_groups=2)
    assert grouped.tolist() == [[0, 1, 2, 3, 4, 5]]


@ISAS
def test_router_of_what_is_no_number_chooses_experts_that_exist(isa: str) -> None:
    logits = torch.full((2, 11), torch.nan)
    logits[1] = torch.arange(11.0)
    logits[1, 3] = torch.nan
    for scoring in ("softmax", "softmax_topk", "sigmoid", "sparsemixer"):
        _, experts = route(isa, logits, top_k=4, scoring=scoring)
        assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 11 for row in experts.tolist())
    _, experts = route(isa, logits, top_k=2, scoring="sigmoid")
    assert experts[1].tolist() == [3, 10]
