"""Functions of vectors over their whole range, and the operators made of them, against float64."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from hybridtrt.plugins.pointwise import ACTIVATIONS, GATED_ACTIVATIONS
from hybridtrt.plugins.pointwise.reference import activate
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel, op_spec
from hybridtrt.plugins.step import StepBatch

ISAS = pytest.mark.parametrize("isa", supported_isas())
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 50])
SEEDS = st.integers(0, 2**32 - 1)
FLOAT_MAX = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny  # below are denormal numbers


def step_of(tokens: int) -> Step:
    zeros, ones = np.zeros(tokens, np.int32), np.ones(1, np.int32)
    positions = np.arange(tokens, dtype=np.int32)
    return Step(StepBatch(zeros, positions, np.array([0, tokens], np.int32), ones * 0, ones, ones, positions[1::2]))


def run(op: str, isa: str, *inputs: Tensor, threads: int = 2, **named: Any) -> Any:
    with patch.dict(os.environ, HYBRIDTRT_ISA=isa):
        return run_one(op_spec(op), step_of(len(inputs[0])), *inputs, threads=threads, **named)


def exact(op: str, *inputs: Tensor, **named: Any) -> Any:
    """The definition in float64."""
    doubles = {name: value.double() if isinstance(value, Tensor) else value for name, value in named.items()}
    return kernel(op, "reference")(step_of(len(inputs[0])), *(x.double() for x in inputs), **doubles)


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance * float(expected.abs().max())


def whole_range() -> Tensor:
    """Numbers of every size and sign, and densely those where the functions bend."""
    sizes = torch.logspace(-45, 38.5, 4001, dtype=torch.float64).clamp(max=FLOAT_MAX).float()
    dense = torch.linspace(-120, 120, 40001)
    return torch.cat([sizes, -sizes, dense, torch.linspace(-1, 1, 4001), torch.zeros(1), -torch.zeros(1)])


def near_relative(found: Tensor, expected: Tensor, relative: float, absolute: float) -> None:
    error = (found.double() - expected).abs() - relative * expected.abs()
    worst = int(error.argmax())
    assert error.max() <= absolute, f"{found[worst]} instead of {expected[worst]}"


# What an activation may be wrong by: relative to the result, and beside that absolutely.
ERRORS = {
    "gelu": (8e-7, 2e-15),  # where the definition cancels in float64
    "gelu_tanh": (8e-7, 2e-15),
    "relu2": (2e-7, 2e-38),
    "sigmoid": (5e-7, 2e-38),
    "silu": (5e-7, 2e-36),
    "tanh": (4e-7, 2e-38),
}


@ISAS
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_over_its_whole_range(isa: str, kind: str) -> None:
    x = whole_range()
    expected = activate(x.double(), kind)
    found = run("activation", isa, x.unsqueeze(1).expand(-1, 1), kind=kind)[:, 0]
    finite = expected.abs() <= FLOAT_MAX
    near_relative(found[finite], expected[finite], *ERRORS[kind])
    assert (found[~finite] == torch.inf).all()
    wide = run("activation", isa, x.unsqueeze(0), kind=kind)[0]
    assert torch.equal(wide, found)  # in whole vectors as at the end of a row


@ISAS
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_of_infinity_and_of_no_number(isa: str, kind: str) -> None:
    limits = {"sigmoid": (1.0, 0.0), "tanh": (1.0, -1.0), "relu2": (torch.inf, 0.0)}
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, -torch.nan, 1.0]])
    patterns = torch.tensor([[0x7FC12345, 0x7FFFFFFF, -1, -2, 0]], dtype=torch.int32).view(torch.float32)  # payloads
    found, payloads = run("activation", isa, x, kind=kind)[0], run("activation", isa, patterns, kind=kind)[0]
    assert found[2:4].isnan().all()
    assert payloads[:4].isnan().all()
    assert not found[4].isnan()
    assert not payloads[4].isnan()
    if kind in limits:
        assert (found[0], found[1]) == limits[kind]
    else:
        assert found[0] == torch.inf
        assert found[1] == 0 or found[1].isnan()  # minus infinity times zero, as in torch


@ISAS
def test_softplus_and_exponential_over_their_range(isa: str) -> None:
    """By way of a scan of one token: y = C h, h = softplus(dt) B, then h = exp(-softplus(dt) A) of a state of 1."""
    dt = torch.cat([torch.linspace(-87, 87, 3001), torch.logspace(-30, 30, 601), -torch.logspace(-30, 1.9, 601)])
    channels = len(dt)
    one, zero = torch.ones(1, channels), torch.zeros(1, channels)
    vectors = [torch.ones(1, 1, 1), torch.ones(1, 1, 1)]
    weights = {"A_log": torch.zeros(channels, 1), "D": zero[0], "dt_bias": zero[0]}
    step = torch.nn.functional.softplus(dt.double(), threshold=100)
    added = run("selective_scan", isa, one, dt.unsqueeze(0), *vectors, **weights, state=torch.zeros(2, channels, 1))
    near_relative(added[0], step, 4e-7, 3e-38)
    kept = run("selective_scan", isa, zero, dt.unsqueeze(0), *vectors, **weights, state=torch.ones(2, channels, 1))
    near_relative(kept[0], (-step).exp(), 4e-7, 1e-7)


@ISAS
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 5),
    lead=st.sampled_from([(), (3,), (2, 3)]),
    size=SIZES,
    kind=st.sampled_from(GATED_ACTIVATIONS),
    gate_scale=st.sampled_from([None, 0.7]),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_gated_activation(
    isa: str,
    tokens: int,
    lead: tuple[int, ...],
    size: int,
    kind: str,
    gate_scale: float | None,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, *lead, 2 * size) * 3
    named = {"kind": kind} | ({} if gate_scale is None else {"gate_scale": gate_scale})
    assert_near(run("gated_activation", isa, x, threads=threads, **named), exact("gated_activation", x, **named))


@ISAS
@settings(max_examples=20, deadline=None)
@given(shape=st.lists(SIZES, min_size=1, max_size=3), ones=st.integers(0, 7), tokens=st.integers(1, 4), seed=SEEDS)
def test_arithmetic_with_broadcasting(isa: str, shape: list[int], ones: int, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, *shape)
    narrow = [1 if ones >> i & 1 else n for i, n in enumerate(shape)]
    y = torch.randn(tokens, *narrow)
    assert_near(run("add", isa, x, y), exact("add", x, y))
    assert_near(run("add", isa, x, y, scale=-0.3), exact("add", x, y, scale=-0.3))
    assert torch.equal(run("multiply", isa, x, y), x * y)
    assert torch.equal(run("scale", isa, x, by=1.7), x * np.float32(1.7))
    for weights in ({"weight": y[0]}, {"weight": torch.randn(shape), "bias": y[0]}):
        assert_near(run("affine", isa, x, **weights), exact("affine", x, **weights))


@ISAS
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 6), groups=st.integers(1, 3), heads=st.integers(1, 5), size=SIZES, seed=SEEDS)
def test_moves_between_layouts(isa: str, tokens: int, groups: int, heads: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, groups, heads, size)
    assert_near(run("mean_heads", isa, x), exact("mean_heads", x))
    y = torch.randn(tokens, groups, heads, 3)
    assert torch.equal(run("concat", isa, x, y), torch.cat([x, y], -1))
    assert torch.equal(run("gather_rows", isa, x), x[1::2])


@ISAS
@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=SIZES,
    weight=st.sampled_from([None, "shared", "own"]),
    gate=st.sampled_from([None, "sigmoid", "silu"]),
    gate_first=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=SEEDS,
)
def test_rms_norm(
    isa: str, tokens: int, groups: int, size: int, weight: str | None, gate: str | None, gate_first: bool, scale: float,
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    inputs = [torch.randn(tokens, groups, size) * scale]
    named: dict[str, Any] = {"eps": 1e-6}
    if gate:
        inputs.append(torch.randn(tokens, groups, size))
        named |= {"gate_kind": gate, "gate_first": gate_first}
    if weight:
        named["weight"] = torch.randn(size) if weight == "shared" else torch.randn(groups, size)
    assert_near(run("rms_norm", isa, *inputs, **named), exact("rms_norm", *inputs, **named), 2e-6)


@ISAS
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 5), size=SIZES, offset=st.sampled_from([0.0, 30.0]), seed=SEEDS)
def test_layer_norm(isa: str, tokens: int, size: int, offset: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, 2, size) + offset
    named = {"weight": torch.randn(size), "bias": torch.randn(size), "eps": 1e-3}
    assert_near(run("layer_norm", isa, x, **named), exact("layer_norm", x, **named), 1e-5)


@ISAS
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 5), heads=st.integers(1, 3), half=SIZES, rest=st.sampled_from([0, 1, 9]), seed=SEEDS)
def test_rotary(isa: str, tokens: int, heads: int, half: int, rest: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, angles = torch.randn(tokens, heads, 2 * half + rest), torch.randn(tokens, half) * 9
    assert_near(run("rotary", isa, x, angles.cos(), angles.sin()), exact("rotary", x, angles.cos(), angles.sin()))


@ISAS
def test_rotary_table_far_into_a_sequence(isa: str) -> None:
    """The angle is a float32 product, as in transformers; its sine and cosine are those of that number."""
    positions = torch.tensor([0, 1, 77, 4096, 131071, 1048575])
    inv_freq = [1.0, 0.31, 1e-2, 1e-5]
    cosines, sines = run("rotary_table", isa, positions, inv_freq=inv_freq, attention_factor=1.25)
    angles = (positions[:, None].float() * torch.tensor(inv_freq)).double()
    near_relative(cosines, angles.cos() * 1.25, 0, 1.5e-7)
    near_relative(sines, angles.sin() * 1.25, 0, 1.5e-7)


@ISAS
@pytest.mark.parametrize("op", ["add", "activation", "rms_norm"])
def test_a_row_is_the_same_alone_and_among_others(isa: str, op: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4, 35)
    cases: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda rows: run("add", isa, rows, rows),
        "activation": lambda rows: run("activation", isa, rows, kind="gelu"),
        "rms_norm": lambda rows: run("rms_norm", isa, rows, eps=1e-5),
    }
    together = cases[op](x)
    for i in range(len(x)):
        assert torch.equal(cases[op](x[i : i + 1])[0], together[i])
