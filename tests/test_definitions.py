"""Definitions that the walkers share, so that comparing walkers says nothing of them: against formulas in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from steps import make_batch, place

from hybridtrt.plugins.pointwise import ACTIVATIONS
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import WALKERS, kernel

F64 = NDArray[np.float64]
FORMULAS: dict[str, Callable[[float], float]] = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def apply(kind: str, x: F64) -> F64:
    return np.vectorize(FORMULAS[kind])(x)


def step(tokens: int) -> Step:
    """One row at slot 1."""
    placement = place([tokens], 4, np.random.default_rng(0))
    placement.slots = [1]
    return Step(make_batch([(0, 0, tokens)], [[0] * tokens], placement))


def tensor(x: F64) -> torch.Tensor:
    return torch.from_numpy(x).float()


@pytest.mark.parametrize("walker", WALKERS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(6,), (3, 4), (2, 1)]),
    eps=st.sampled_from([1e-6, 1e-3, 0.5]),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    gate=st.sampled_from([None, "silu", "sigmoid"]),
    gate_first=st.booleans(),
    whole=st.booleans(),
)
def test_rms_norm(
    walker: str,
    seed: int,
    shape: tuple[int, ...],
    eps: float,
    size: float,
    gate: str | None,
    gate_first: bool,
    whole: bool,
) -> None:
    """Any epsilon, values of any size, a gate of either kind before or after, one weight for all heads or one each."""
    rng = np.random.default_rng(seed)
    x, z = rng.standard_normal((2, 5, *shape)) * np.array([size, 1.0]).reshape(2, *[1] * (1 + len(shape)))
    weight = rng.standard_normal(shape if whole else shape[-1:])
    opened = np.ones_like(z) if gate is None else apply(gate, z)
    want = x * opened if gate_first else x
    want = weight * want / np.sqrt((want**2).mean(-1, keepdims=True) + eps)
    want = want if gate_first else want * opened
    operands = [tensor(x)] if gate is None else [tensor(x), tensor(z)]
    gating = {} if gate is None else {"gate_first": gate_first, "gate_kind": gate}
    got = kernel("rms_norm", walker)(step(5), *operands, weight=tensor(weight), eps=eps, **gating)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("walker", WALKERS)
def test_every_activation_has_its_formula(walker: str) -> None:
    assert set(FORMULAS) >= set(ACTIVATIONS)
    x = np.linspace(-6, 6, 48).reshape(3, 16)
    up = np.random.default_rng(0).standard_normal((3, 16))
    both = tensor(np.concatenate([x, up], axis=1))
    for kind in ACTIVATIONS:
        got = kernel("activation", walker)(step(3), tensor(x), kind=kind)
        np.testing.assert_allclose(got.numpy(), apply(kind, x), rtol=1e-5, atol=1e-6)
        for scale in (1.0, -0.5):
            got = kernel("gated_activation", walker)(step(3), both, kind=kind, gate_scale=scale)
            np.testing.assert_allclose(got.numpy(), apply(kind, scale * x) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_experts_use_the_activation_they_are_given(walker: str, kind: str, gated: bool) -> None:
    rng = np.random.default_rng(1)
    x, up, down = (
        rng.standard_normal((4, 6)),
        rng.standard_normal((3, 8, 6)),
        rng.standard_normal((3, 6, 4 if gated else 8)),
    )
    weights, chosen = rng.random((4, 2)), np.array([[0, 2], [2, 1], [1, 0], [0, 1]])
    want = np.zeros_like(x)
    for t, experts in enumerate(chosen):
        for weight, expert in zip(weights[t], experts, strict=True):
            h = up[expert] @ x[t]
            h = apply(kind, h[:4]) * h[4:] if gated else apply(kind, h)
            want[t] += weight * (down[expert] @ h)
    operands = (tensor(x), tensor(weights), torch.from_numpy(chosen))
    got = kernel("experts", walker)(step(4), *operands, up=tensor(up), down=tensor(down), activation=kind, gated=gated)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("walker", WALKERS)
def test_linear_with_and_without_bias(walker: str) -> None:
    rng = np.random.default_rng(2)
    x, weight, bias = rng.standard_normal((5, 4)), rng.standard_normal((3, 4)), rng.standard_normal(3)
    for own in (None, bias):
        got = kernel("linear", walker)(
            step(5), tensor(x), weight=tensor(weight), bias=None if own is None else tensor(own)
        )
        np.testing.assert_allclose(got.numpy(), x @ weight.T + (0 if own is None else own), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_l2_norm_of_queries_and_keys(walker: str, size: float) -> None:
    """x / sqrt(sum x^2 + 1e-6), so that small vectors stay small; the rule runs on these as on any others."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((7, 2, 4)) for _ in range(3))
    q, k, b = q * size, k * size, rng.standard_normal((7, 2))
    normed = [x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k)]

    def run(queries: F64, keys: F64, l2_norm: bool) -> torch.Tensor:
        operands = [tensor(x) for x in (queries, keys, v, b)]
        result: torch.Tensor = kernel("linear_attention", walker)(
            step(7), *operands, state=torch.zeros(2, 2, 4, 4), rule="delta", scale=0.7, l2_norm=l2_norm
        )
        return result

    torch.testing.assert_close(run(q, k, True), run(*normed, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("limits", [(0.0, None), (0.4, None), (0.0, 1.1), (0.4, 1.1)])
def test_limits_of_the_time_step(walker: str, limits: tuple[float, float | None]) -> None:
    """softplus(dt + bias) within the limits acts as a dt that has such a softplus by itself."""
    rng = np.random.default_rng(4)
    x, dt = rng.standard_normal((70, 4, 3)), rng.standard_normal((70, 4))
    B, C = (tensor(rng.standard_normal((70, 2, 5))) for _ in range(2))
    bias = rng.standard_normal(4)
    low, high = limits
    limited = np.clip(np.log1p(np.exp(dt + bias)), low, high)
    assert (limited == low).any() == (low > 0)
    assert (limited == high).any() == (high is not None)
    own = {name: tensor(rng.standard_normal(4)) for name in ("A_log", "D")}

    def run(dt: F64, dt_bias: F64, **attributes: float | None) -> torch.Tensor:
        result: torch.Tensor = kernel("ssd", walker)(
            step(70),
            tensor(x),
            tensor(dt),
            B,
            C,
            **own,
            dt_bias=tensor(dt_bias),
            state=torch.zeros(2, 4, 3, 5),
            **attributes,
        )
        return result

    want = run(np.log(np.expm1(limited)), np.zeros(4))
    torch.testing.assert_close(run(dt, bias, dt_min=low, dt_max=high), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("walker", WALKERS)
def test_decay_of_any_strength_in_one_head(walker: str) -> None:
    """After a token that forgets everything the sums of decays are huge; what follows is as exact as without it."""
    rng = np.random.default_rng(5)
    T = 60
    q, k, v = (tensor(rng.standard_normal((T, 1, 4))) for _ in range(3))
    a = np.full((T, 1), -9.0)  # hardly any decay
    a[0] = 3e5  # and none left
    weights = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1)}

    def run(first: int) -> torch.Tensor:
        operands = (q[first:], k[first:], v[first:], tensor(a[first:]))
        state = torch.zeros(2, 1, 4, 4)
        state[1] = 1.0 if first == 0 else 0.0
        result: torch.Tensor = kernel("linear_attention", walker)(
            step(T - first), *operands, **weights, state=state, rule="gated", scale=1.0
        )
        return result

    whole = run(0)
    rest = run(1)
    # The first token leaves k v^T behind; without it the rest starts from nothing, so take the difference out.
    decay = torch.from_numpy(np.exp(-np.cumsum(np.log1p(np.exp(a[1:])), axis=0))).float()
    carried = torch.einsum("thk,k->th", q[1:], k[0, 0])[..., None] * v[0] * decay[..., None]
    torch.testing.assert_close(whole[1:], rest + carried, rtol=1e-4, atol=1e-4)
