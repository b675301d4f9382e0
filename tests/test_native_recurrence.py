"""C++ kernels of the linear recurrences against their definitions in float64, and against themselves bit by bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import make_batch, place
from torch import Tensor

from hybridtrt.plugins.native.library import supported_isas
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel

LENGTHS = st.lists(st.sampled_from([1, 1, 2, 3, 17, 31, 32, 33, 107]), min_size=1, max_size=4)
POOLS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # how near a stored state must be


@dataclass
class Case:
    """An operator, the shapes of its inputs (without tokens), weights and states (without slots), its attributes."""

    op: str
    inputs: list[tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    states: dict[str, tuple[int, ...]]
    attributes: dict[str, Any] = field(default_factory=dict)


def linear_attention(rule: str, key_heads: int, heads: int, K: int, V: int, decay: str = "head", **more: Any) -> Case:
    gated = "gated" in rule
    gate = (heads, K) if decay == "channel" else (heads,)
    inputs = [(key_heads, K), (key_heads, K), (heads, V)]
    inputs += [gate] * (gated and decay != "constant") + [(heads,)] * ("delta" in rule)
    weights = {"A_log": (heads,), **({} if decay == "constant" else {"dt_bias": gate})} if gated else {}
    attributes = {"rule": rule, "scale": K**-0.5, "l2_norm": "delta" in rule, **more}
    return Case("linear_attention", inputs, weights, {"state": (heads, K, V)}, attributes)


def ssd(heads: int, groups: int, P: int, N: int, **more: Any) -> Case:
    weights = {"A_log": (heads,), "D": (heads,), "dt_bias": (heads,)}
    return Case("ssd", [(heads, P), (heads,), (groups, N), (groups, N)], weights, {"state": (heads, P, N)}, more)


CASES = {
    "linear": linear_attention("linear", 2, 6, 7, 19),
    "delta": linear_attention("delta", 3, 3, 20, 33, beta_scale=2.0),
    "gated": linear_attention("gated", 1, 3, 33, 5),
    "gated_delta": linear_attention("gated_delta", 2, 4, 37, 50),
    "gated_delta_even": linear_attention("gated_delta", 1, 2, 64, 64),
    "constant": linear_attention("gated", 4, 4, 24, 16, "constant"),
    "channels": linear_attention("gated", 2, 2, 21, 34, "channel"),
    "delta_channels": linear_attention("gated_delta", 1, 2, 40, 17, "channel", decay_bound=-5.0),
    "ssd": ssd(6, 2, 13, 35),
    "ssd_even": ssd(3, 1, 32, 64, dt_min=0.1, dt_max=0.9),
    "low_rank": Case(
        "low_rank_attention", [(6, 19), (2, 19), (2, 19)], {"projection": (200, 37)},
        {"keys": (2, 19, 37), "values": (2, 37, 19)}, {"scale": 0.2},
    ),
    "from": Case(
        "linear_attention_from", [(6, 18), (6, 18), (2, 18), (2, 18)], {}, {"state": (2, 18, 19)}, {"limit": 40}
    ),
}  # fmt: skip


def random_operands(case: Case, tokens: int, seed: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(seed)
    inputs = [torch.randn(tokens, *shape) for shape in case.inputs]
    return inputs, {name: torch.randn(shape) * 0.5 for name, shape in case.weights.items()}


def step_of(lengths: list[int], slots: int) -> Step:
    """Rows that read slots 1, 1, 2, 3, ... and write those behind them."""
    rows = [(s, 0, n) for s, n in enumerate(lengths)]
    batch = make_batch(rows, [[0] * n for n in lengths], place(lengths, 4, np.random.default_rng(0)))
    batch.state_src[:] = [max(1, s) for s in range(len(lengths))]
    batch.state_dst[:] = np.arange(len(lengths)) + slots
    return Step(batch)


def random_states(case: Case, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = {name: torch.randn(9, *shape, generator=generator) for name, shape in case.states.items()}
    if case.op == "linear_attention_from":
        states = {name: state.abs() for name, state in states.items()}  # a normaliser is a sum of positive numbers
    return {name: state.to(dtype) for name, state in states.items()}


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None)
@given(
    lengths=LENGTHS,
    threads=st.sampled_from([1, 2]),
    dtype=st.sampled_from(list(POOLS)),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_definition(
    name: str, isa: str, lengths: list[int], threads: int, dtype: torch.dtype, seed: int
) -> None:
    case, step = CASES[name], step_of(lengths, 5)
    inputs, weights = random_operands(case, sum(lengths), seed)
    exact, states = random_states(case, seed, dtype), random_states(case, seed, dtype)
    reference: Callable[..., Tensor] = kernel(case.op, "reference")
    doubles = {role: weight.double() for role, weight in weights.items()}
    expected = reference(step, *(x.double() for x in inputs), **doubles, **exact, **case.attributes)
    with patch.dict(os.environ, {"HYBRIDTRT_ISA": isa}):
        found = kernel(case.op, "cpu")(step, *inputs, **weights, **states, **case.attributes, threads=threads)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for role, state in states.items():
        want = exact[role].double()
        assert (state.double() - want).abs().max() <= POOLS[dtype] * want.abs().max()
        untouched = [0, 1, 2, 3, 4, *range(5 + len(lengths), 9)]
        torch.testing.assert_close(state[untouched], exact[role][untouched], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 1 << 30))
def test_a_row_is_the_same_alone_in_a_batch_and_with_any_number_of_threads(
    name: str, lengths: list[int], seed: int
) -> None:
    case = CASES[name]
    inputs, weights = random_operands(case, sum(lengths), seed)
    function = kernel(case.op, "cpu")
    results = []
    for threads in (1, 2, 5):
        states = random_states(case, seed, torch.float32)
        out = function(step_of(lengths, 5), *inputs, **weights, **states, **case.attributes, threads=threads)
        results.append((out, states))
        torch.testing.assert_close(out, results[0][0], rtol=0, atol=0)
        for role, state in states.items():
            torch.testing.assert_close(state, results[0][1][role], rtol=0, atol=0)
    out, states = results[0]
    row = len(lengths) - 1
    last = slice(sum(lengths[:-1]), None)
    alone = random_states(case, seed, torch.float32)
    step = step_of([lengths[-1]], 5 + row)
    step.state_src[:] = max(1, row)
    again = function(step, *(x[last] for x in inputs), **weights, **alone, **case.attributes)
    torch.testing.assert_close(again, out[last], rtol=0, atol=0)
    for role, state in alone.items():
        torch.testing.assert_close(state[5 + row], states[role][5 + row], rtol=0, atol=0)


@pytest.mark.parametrize("A_log", [-14.0, -7.0, 0.0, 6.0])
@pytest.mark.parametrize("decay", ["head", "channel", "constant"])
def test_slow_and_fast_decays_over_many_chunks(decay: str, A_log: float) -> None:
    """Sums of decays are large where their differences are small; none overflows."""
    case = linear_attention("gated", 1, 2, 16, 16, decay)
    inputs, weights = random_operands(case, 700, 0)
    weights["A_log"].fill_(A_log)
    exact, state = (random_states(case, 0, torch.float32) for _ in range(2))
    step = step_of([700], 5)
    doubles = {role: weight.double() for role, weight in weights.items()}
    reference = kernel(case.op, "reference")
    exact = {role: value.double() for role, value in exact.items()}
    expected = reference(step, *(x.double() for x in inputs), **doubles, **exact, **case.attributes)
    found = kernel(case.op, "cpu")(step, *inputs, **weights, **state, **case.attributes)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    torch.testing.assert_close(state["state"].double(), exact["state"], rtol=0, atol=1e-5 * float(expected.abs().max()))
