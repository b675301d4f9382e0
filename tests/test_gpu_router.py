"""The router in the Triton language: every variant against the definition, ties, and what is ranked beyond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_calls import call
from test_capacity import RANKED
from test_experts import step

from hybridtrt.plugins.gpu.torch_launch import TorchLauncher
from hybridtrt.plugins.registry import kernel

TOKENS, TOP_K = 3, 2


def route(
    walker: str, logits: torch.Tensor, attributes: dict[str, Any], bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    biased = {} if bias is None else {"selection_bias": bias}
    weights, numbers = kernel("router", walker)(step(len(logits)), logits, **biased, **attributes)
    return weights, numbers


@pytest.mark.parametrize("experts", [8, 28])
@pytest.mark.parametrize("name", RANKED)
def test_every_variant_is_as_defined(name: str, experts: int) -> None:
    """With room for all experts to be ranked (28 are sorted), and for the chosen alone, to the same bits."""
    torch.manual_seed(experts)
    logits, attributes = torch.randn(TOKENS, experts) * 2, {"top_k": TOP_K} | RANKED[name]
    bias = torch.randn(experts) if attributes.pop("selection_bias", False) else None
    most = experts // attributes.get("num_groups", 1) * attributes.get("top_groups", 1)
    want = route("reference", logits.double(), attributes | {"num_ranked": most},
                 None if bias is None else bias.double())  # fmt: skip
    weights, numbers = route("gpu", logits, attributes | {"num_ranked": most}, bias)
    assert torch.equal(numbers, want[1])
    torch.testing.assert_close(weights.double(), want[0], rtol=1e-5, atol=1e-6)
    chosen = route("gpu", logits, attributes, bias)
    assert torch.equal(chosen[0], weights[:, :TOP_K])
    assert torch.equal(chosen[1], numbers[:, :TOP_K])


@pytest.mark.parametrize("ranked", [3, 30])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid", "sparsemixer"])
def test_among_equals_the_lower_number_is_first(scoring: str, ranked: int) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [2.0, -0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 2.0, 2.0]]).repeat(1, 10)
    attributes = {"top_k": 3, "scoring": scoring, "num_ranked": ranked}
    _, numbers = route("gpu", logits, attributes)
    assert torch.equal(numbers, logits.argsort(dim=1, descending=True, stable=True)[:, :ranked])


def test_groups_of_equals_and_groups_that_are_refused() -> None:
    """The lower group of equals; what is beyond the best groups comes after all that is in them."""
    logits = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.5, 0.5], [3.0, 0.0, 2.0, 2.0, 1.0, 1.0], [-9.0, -9.0, 1, 0, 1, 0]])
    attributes = {"top_k": 2, "scoring": "softmax", "num_groups": 3, "top_groups": 1, "num_ranked": 2}
    _, top2 = route("gpu", logits, attributes | {"group_score": "top2"})
    assert top2.tolist() == [[0, 1], [0, 1], [2, 3]]
    _, best = route("gpu", logits * torch.tensor([1, 1, 1, 1, 4.0, 1]), attributes | {"group_score": "max"})
    assert best.tolist() == [[4, 5], [4, 5], [4, 5]]


def test_logits_that_differ_where_their_probabilities_do_not() -> None:
    logits = torch.tensor([[0.0, -300.0, -200.0, -250.0]])
    weights, numbers = route("gpu", logits, {"top_k": 3, "scoring": "softmax"})
    assert numbers.tolist() == [[0, 2, 3]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_a_group_whose_merit_is_no_number_is_the_best() -> None:
    bias = torch.tensor([0.0, 0.0, torch.inf, -torch.inf])
    attributes = {"top_k": 1, "scoring": "sigmoid", "num_groups": 2, "top_groups": 1}
    _, numbers = route("gpu", torch.zeros(1, 4), attributes, bias)
    assert numbers.tolist() == [[2]]


@pytest.mark.parametrize("ranked", [3, 30])
def test_infinite_logits_and_such_that_are_not_numbers(ranked: int) -> None:
    """NaN counts as the largest; each expert is ranked once."""
    logits = torch.full((2, 30), -torch.inf)
    logits[0, 7], logits[1, 4], logits[1, 9] = 1.0, torch.nan, 5.0
    _, numbers = route("gpu", logits, {"top_k": 3, "scoring": "softmax", "num_ranked": ranked})
    assert numbers[:, :3].tolist() == [[7, 0, 1], [4, 9, 0]]
    assert all(len(set(row)) == ranked for row in numbers.tolist())


def test_float16_logits_and_int32_numbers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, 5).half()
    attributes = {"top_k": 2, "scoring": "softmax", "renormalize": True}
    want = route("reference", logits.double(), attributes)
    declared = call("router", {"logits": (5,)}, {}, {}, attributes, dtype="float16")
    weights, numbers = (
        replace(result, dtype=dtype) for result, dtype in zip(declared.results, ("float32", "int32"), strict=True)
    )
    launcher = TorchLauncher(replace(declared, results=(weights, numbers)), {"logits": logits})
    launcher.run()
    got = launcher.results
    assert [x.dtype for x in got] == [torch.float32, torch.int32]
    assert torch.equal(got[1], want[1].int())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-6)
