"""Experts in the Triton language against their definition in float64: few pairs and many, and lost pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_experts import step

from hybridtrt.plugins.experts import gpu
from hybridtrt.plugins.gpu import dispatch
from hybridtrt.plugins.pointwise import ACTIVATIONS, GATED_ACTIVATIONS
from hybridtrt.plugins.registry import kernel

HIDDEN, INNER, EXPERTS, TOP_K = 20, 9, 5, 2
FEW_TOKENS = 20
Operands = dict[str, torch.Tensor]


@pytest.fixture(params=[FEW_TOKENS, 0], ids=["few", "many"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many tokens are few, where each has TOP_K experts."""
    monkeypatch.setattr(gpu, "FEW", request.param * TOP_K)
    monkeypatch.setattr(dispatch, "BLOCK", 32)  # the interpreter is slow


def random_weights(gated: bool, bias: bool) -> Operands:
    rows = 2 * INNER if gated else INNER
    weights = {"up": torch.randn(EXPERTS, rows, HIDDEN) / 4, "down": torch.randn(EXPERTS, HIDDEN, INNER)}
    if bias:
        weights |= {"up_bias": torch.randn(EXPERTS, rows), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    return weights


def chosen(tokens: int, top_k: int = TOP_K, experts: int = EXPERTS) -> torch.Tensor:
    """Different experts of each token; some are none."""
    return torch.stack([torch.randperm(experts + 1)[:top_k] for _ in range(tokens)])


def run(walker: str, inputs: list[torch.Tensor], weights: Operands, attributes: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = kernel("experts", walker)(step(len(inputs[0])), *inputs, **weights, **attributes)
    return out


def as_defined(
    inputs: list[torch.Tensor], weights: Operands, attributes: dict[str, Any], allowed: float = 1e-5
) -> None:
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    want = run("reference", exact, {name: x.double() for name, x in weights.items()}, attributes)
    got = run("gpu", inputs, weights, attributes)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=allowed * want.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 9, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("gated", [True, False])
def test_few_and_many_pairs(tokens: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FEW", FEW_TOKENS * TOP_K)
    monkeypatch.setattr(dispatch, "BLOCK", 32)
    torch.manual_seed(tokens)
    attributes = {"activation": "silu", "gated": gated}
    inputs = [torch.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K), chosen(tokens)]
    as_defined(inputs, random_weights(gated, False), attributes)


@pytest.mark.parametrize(
    ("kind", "gated", "clamp"),
    [
        *((kind, False, None) for kind in ACTIVATIONS),
        *((kind, True, 0.5) for kind in GATED_ACTIVATIONS),
    ],
)
def test_activations_and_biases(kind: str, gated: bool, clamp: float | None) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, HIDDEN), torch.rand(4, TOP_K), chosen(4).int()]
    as_defined(inputs, random_weights(gated, True), {"activation": kind, "gated": gated, "clamp": clamp})


@pytest.mark.usefixtures("few")
def test_float16() -> None:
    torch.manual_seed(1)
    weights = {name: (x / 4).half() for name, x in random_weights(True, True).items()}
    inputs = [torch.randn(7, HIDDEN).half(), torch.rand(7, TOP_K), chosen(7)]
    as_defined(inputs, weights, {"activation": "silu"}, 2e-3)


@pytest.mark.usefixtures("few")
def test_one_expert_for_all_every_expert_for_each_and_none() -> None:
    torch.manual_seed(2)
    weights, attributes = random_weights(True, False), {"activation": "silu"}
    for numbers in (
        torch.full((33, 1), 3),
        torch.stack([torch.randperm(EXPERTS) for _ in range(7)]),
        torch.full((3, 2), EXPERTS),
    ):
        inputs = [torch.randn(len(numbers), HIDDEN), torch.rand(numbers.shape), numbers]
        as_defined(inputs, weights, attributes)


def test_many_blocks_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than are added up at once."""
    monkeypatch.setattr(dispatch, "BLOCK", 4)
    monkeypatch.setattr(gpu, "FEW", 0)
    torch.manual_seed(3)
    inputs = [torch.randn(40, HIDDEN), torch.rand(40, TOP_K), chosen(40)]
    as_defined(inputs, random_weights(False, False), {"activation": "relu2", "gated": False})


@pytest.mark.usefixtures("few")
def test_a_token_is_the_same_in_any_batch() -> None:
    """In numbers whose sums are exact: the interpreter's products depend on the row of a tile."""
    torch.manual_seed(4)
    weights = {name: x.mul(2).round().half() for name, x in random_weights(True, False).items()}
    inputs = [torch.randn(20, HIDDEN).round().half(), torch.rand(20, TOP_K), chosen(20)]
    together = run("gpu", inputs, weights, {"activation": "silu"})
    for token in (0, 9, 19):
        alone = run("gpu", [x[token : token + 1] for x in inputs], weights, {"activation": "silu"})
        assert torch.equal(alone[0], together[token])
