"""Linear attention's gates and the gated norm after it: forms that must agree, and operands that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import make_batch, place

from hybridtrt.plugins.caches import StateSpec
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import WALKERS, kernel
from hybridtrt.plugins.spec import TensorSpec

HEADS, K, V = 3, 4, 5
LENGTHS = [1, 70, 2, 64]
TOKENS = sum(LENGTHS)


def step() -> Step:
    """Rows of all lengths from the start of their sequences."""
    rows = [(s, 0, n) for s, n in enumerate(LENGTHS)]
    return Step(make_batch(rows, [[0] * n for n in LENGTHS], place(LENGTHS, 4, np.random.default_rng(0))))


def attend(walker: str, *gates: torch.Tensor, rule: str, **operands: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOKENS, HEADS, d, generator=generator) for d in (K, K, V))
    state = torch.zeros(len(LENGTHS) + 3, HEADS, K, V)
    function = kernel("linear_attention", walker)
    result: torch.Tensor = function(
        step(), q, k, v, *gates, state=state, rule=rule, scale=0.5, l2_norm=True, **operands
    )
    return result


@pytest.mark.parametrize("walker", WALKERS)
def test_forms_of_the_gates_agree(walker: str) -> None:
    """Equal decays in all channels are one a head; a constant decay is one whose gate never moves."""
    torch.manual_seed(1)
    a, b = torch.randn(TOKENS, HEADS), torch.randn(TOKENS, HEADS)
    A_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS)
    one = attend(walker, a, b, rule="gated_delta", A_log=A_log, dt_bias=dt_bias)
    wide = {"A_log": A_log, "dt_bias": dt_bias[:, None].expand(HEADS, K)}
    channels = attend(walker, a[..., None].expand(TOKENS, HEADS, K), b, rule="gated_delta", **wide)
    torch.testing.assert_close(channels, one, rtol=1e-4, atol=1e-5)

    constant = attend(walker, rule="gated", A_log=A_log)
    still = attend(
        walker, torch.zeros(TOKENS, HEADS), rule="gated", A_log=A_log, dt_bias=torch.full((HEADS,), np.expm1(1.0)).log()
    )
    torch.testing.assert_close(constant, still, rtol=1e-4, atol=1e-5)

    # A bounded decay of rate 0 is half its bound for every token.
    bounded = attend(walker, a, rule="gated", A_log=torch.full((HEADS,), -60.0), dt_bias=dt_bias, decay_bound=-3.0)
    torch.testing.assert_close(bounded, attend(walker, rule="gated", A_log=torch.full((HEADS,), 1.5).log()))

    doubled = attend(walker, torch.full((TOKENS, HEADS), 40.0), rule="delta", beta_scale=0.5)
    torch.testing.assert_close(doubled, attend(walker, torch.zeros(TOKENS, HEADS), rule="delta"))


@pytest.mark.parametrize(
    ("gates", "weights", "attributes", "message"),
    [
        ([(HEADS,)], {"A_log": (HEADS,), "dt_bias": (HEADS,)}, {"rule": "gated"}, None),
        ([(HEADS, K)], {"A_log": (HEADS,), "dt_bias": (HEADS, K)}, {"rule": "gated", "decay_bound": -5.0}, None),
        ([], {"A_log": (HEADS,)}, {"rule": "gated"}, None),
        ([(HEADS,)], {}, {"rule": "delta", "beta_scale": 2.0}, None),
        ([], {}, {"rule": "gated"}, "rule 'gated' does not take"),
        ([], {"A_log": (HEADS,)}, {"rule": "linear"}, "rule 'linear' does not take"),
        ([], {"dt_bias": (HEADS,)}, {"rule": "linear"}, "dt_bias without A_log"),
        ([(HEADS,)], {"A_log": (HEADS,)}, {"rule": "gated"}, "takes 0 gate inputs, not 1"),
        ([(HEADS,)], {"A_log": (HEADS,), "dt_bias": (HEADS,)}, {"rule": "gated_delta"}, "takes 2 gate inputs, not 1"),
        ([(V,)], {"A_log": (HEADS,), "dt_bias": (V,)}, {"rule": "gated"}, "is neither"),
        ([(HEADS, K)], {"A_log": (HEADS,), "dt_bias": (HEADS,)}, {"rule": "gated"}, "dt_bias .* does not fit gate"),
        ([(HEADS, K)], {}, {"rule": "delta"}, r"is not \[T, heads\]"),
        ([], {"A_log": (HEADS,)}, {"rule": "gated", "decay_bound": -5.0}, "decay_bound=-5.0 without gate"),
        ([(HEADS,)], {"A_log": (HEADS,), "dt_bias": (HEADS,)}, {"rule": "gated", "decay_bound": 0.0}, "not below 0"),
        ([], {}, {"rule": "hebbian"}, "rule 'hebbian' is not one of"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    gates: list[tuple[int, ...]], weights: dict[str, tuple[int, ...]], attributes: dict[str, Any], message: str | None
) -> None:
    program = Program(
        weights={name: TensorSpec(shape) for name, shape in weights.items()},
        caches={"state": StateSpec("state", (HEADS, K, V))},
    )
    shapes = {"q": (HEADS, K), "k": (HEADS, K), "v": (HEADS, V), **{f"gate_{i}": g for i, g in enumerate(gates)}}
    inputs = [program.add_input(name, TensorSpec(("T", *shape))) for name, shape in shapes.items()]
    operands = {"weights": {name: name for name in weights}, "caches": {"state": "state"}}
    if message is None:
        program.call("linear_attention", "core", *inputs, **operands, scale=1.0, **attributes)
        return
    with pytest.raises(ValueError, match=message):
        program.call("linear_attention", "core", *inputs, **operands, scale=1.0, **attributes)


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("kind", "function"), [("silu", F.silu), ("sigmoid", torch.sigmoid)])
def test_gated_norm(kind: str, function: Any, first: bool, walker: str) -> None:
    torch.manual_seed(2)
    x, gate, weight = torch.randn(TOKENS, HEADS, V), torch.randn(TOKENS, HEADS, V), torch.randn(V)
    got = kernel("rms_norm", walker)(step(), x, gate, weight=weight, eps=1e-3, gate_first=first, gate_kind=kind)
    plain = x * function(gate) if first else x
    want = F.rms_norm(plain, (V,), weight, 1e-3) * (1 if first else function(gate))
    torch.testing.assert_close(got, want)


def test_a_gate_of_another_kind_is_refused() -> None:
    program = Program(weights={"w": TensorSpec((V,))})
    x, gate = (program.add_input(name, TensorSpec(("T", V))) for name in ("x", "gate"))
    with pytest.raises(ValueError, match="gate_kind 'tanh' is not one of"):
        program.call("rms_norm", "norm", x, gate, weights={"weight": "w"}, eps=1.0, gate_kind="tanh")
