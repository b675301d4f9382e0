"""Routers and experts against the modules of transformers, the definitions against the kernels, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import make_batch, place
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from hybridtrt.converters.ffns import MoeConfig, RouterConfig
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import WALKERS, kernel
from hybridtrt.plugins.spec import Load, TensorSpec

HIDDEN, EXPERTS, TOP_K, TOKENS = 6, 8, 3, 40
BASE = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
DEEPSEEK = BASE | {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "n_routed_experts": EXPERTS}
LFM2 = BASE | {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "use_expert_bias": True}
GREEDY, GROUPED = ({"topk_method": method} for method in ("greedy", "group_limited_greedy"))
SIGMOID = {"scoring": "sigmoid", "scaling": 2.5, "num_groups": 4, "top_groups": 2}
SOFTMAX = {"scoring": "softmax", "scaling": 2.5}

# module of transformers, class, its config, attributes of our operator
ROUTERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", BASE, {"scoring": "softmax", "renormalize": True}),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", BASE, {"scoring": "softmax_topk"}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2TopKRouter", BASE, {"scoring": "sigmoid", "renormalize": True}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2TopkRouter", DEEPSEEK | GREEDY, SOFTMAX),
    "deepseek_v2.groups": ("deepseek_v2", "DeepseekV2TopkRouter", DEEPSEEK | GROUPED,
                           SOFTMAX | {"num_groups": 4, "top_groups": 2, "group_score": "max"}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter", DEEPSEEK | {"norm_topk_prob": True},
                    SIGMOID | {"renormalize": True, "renormalize_eps": 1e-20}),
    "deepseek_v3.plain": ("deepseek_v3", "DeepseekV3TopkRouter", DEEPSEEK | {"norm_topk_prob": False}, SIGMOID),
    "nemotron_h": ("nemotron_h", "NemotronHTopkRouter", DEEPSEEK | {"norm_topk_prob": True},
                   SIGMOID | {"renormalize": True, "renormalize_eps": 1e-20}),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeTopKRouter", LFM2,
                 {"scoring": "sigmoid", "scaling": 1.5, "renormalize": True, "renormalize_eps": 1e-6}),
}  # fmt: skip


def step(tokens: int) -> Step:
    placement = place([tokens], 4, np.random.default_rng(0))
    return Step(make_batch([(0, 0, tokens)], [[0] * tokens], placement))


def assert_same_routing(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Weights by expert; the order of the chosen does not matter."""
    dense = [torch.zeros(TOKENS, EXPERTS).scatter_(1, experts, weights.float()) for weights, experts in (ours, theirs)]
    torch.testing.assert_close(dense[0], dense[1])


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_router_is_that_of_transformers(name: str, walker: str) -> None:
    module, cls, config, attributes = ROUTERS[name]
    torch.manual_seed(0)
    router = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), cls)(SimpleNamespace(**config))
    x = torch.randn(TOKENS, HIDDEN)
    bias = torch.randn(EXPERTS) * 0.3
    for parameter in router.parameters():
        parameter.normal_()
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias.copy_(bias)
    outside = module in ("minimax_m2", "lfm2_moe")  # the block holds the bias and passes it
    _, weights, experts = router(x, bias) if outside else router(x)
    biased = {"selection_bias": bias} if outside or hasattr(router, "e_score_correction_bias") else {}
    logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))
    ours = kernel("router", walker)(step(TOKENS), logits, **biased, top_k=TOP_K, **attributes)
    assert_same_routing(ours, (weights, experts))


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3, 5.0])
@pytest.mark.parametrize("walker", WALKERS)
def test_sparsemixer_is_that_of_transformers(walker: str, jitter: float) -> None:
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(TOKENS - 2, EXPERTS), -torch.rand(1, EXPERTS), torch.zeros(1, EXPERTS)])
    weights, experts = sparsemixer(logits, jitter, training=False)
    ours = kernel("router", walker)(step(TOKENS), logits, top_k=2, scoring="sparsemixer", jitter_eps=jitter)
    assert_same_routing(ours, (weights, experts))


@pytest.mark.parametrize(
    ("shape", "attributes", "message"),
    [
        (8, {"scoring": "entmax"}, "scoring 'entmax' is not one of"),
        (8, {"top_k": 9}, r"top_k=9 is not in 1..8"),
        (8, {"num_groups": 3, "top_groups": 2}, "8 experts in 3 groups"),
        (8, {"num_groups": 4, "top_groups": 1, "top_k": 3}, "top_k=3 from 1 of 4 groups of 2 by top2"),
        (8, {"num_groups": 8, "top_groups": 4}, "top_k=2 from 4 of 8 groups of 1 by top2"),
        (8, {"num_groups": 4, "top_groups": 5}, "top_k=2 from 5 of 4 groups of 2 by top2"),
        (8, {"num_groups": 4, "group_score": "mean"}, "group_score 'mean' is not one of"),
        (8, {"scoring": "sparsemixer", "num_groups": 4, "top_groups": 2}, "8 experts in 4 groups"),
    ],
)
def test_router_that_does_not_fit_is_refused(shape: int, attributes: dict[str, Any], message: str) -> None:
    program = Program()
    logits = program.add_input("logits", TensorSpec(("T", shape)))
    with pytest.raises(ValueError, match=rf"r \(router\): {message}"):
        program.call("router", "r", logits, **({"top_k": 2, "scoring": "sigmoid"} | attributes))


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"num_groups": 3}, "n_group=3 does not divide the 8 experts"),
        ({"num_groups": 4, "top_groups": 5}, r"topk_group=5 is not in 1..4 \(n_group\)"),
        ({"num_groups": 8, "top_groups": 4}, "n_group=8: groups of 1 expert have no best two"),
        ({"num_groups": 4, "top_groups": 1}, "num_experts_per_tok=3 exceeds the 2 experts of topk_group=1 groups"),
    ],
)
def test_moe_that_does_not_fit_is_refused(router: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoeConfig(8, 3, 16, RouterConfig("sigmoid", **router))
    assert MoeConfig(8, 3, 16, RouterConfig("sigmoid", num_groups=4, top_groups=2)).router.top_groups == 2


def random_experts(gated: bool, bias: bool) -> dict[str, torch.Tensor]:
    inner = 5
    rows = 2 * inner if gated else inner
    weights = {"up": torch.randn(EXPERTS, rows, HIDDEN), "down": torch.randn(EXPERTS, HIDDEN, inner)}
    if bias:
        weights |= {"up_bias": torch.randn(EXPERTS, rows), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    return weights


@given(
    tokens=st.integers(1, 9),
    seed=st.integers(0, 1000),
    kind=st.sampled_from([("silu", True), ("swiglu_oai", True), ("relu2", False), ("gelu_tanh", True)]),
    bias=st.booleans(),
    clamp=st.sampled_from([None, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_grouped_experts_equal_the_definition(
    tokens: int, seed: int, kind: tuple[str, bool], bias: bool, clamp: float | None
) -> None:
    activation, gated = kind
    torch.manual_seed(seed)
    weights = random_experts(gated, bias)
    attributes = {"activation": activation, "gated": gated, "clamp": clamp if gated else None}
    x, routing = torch.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K)
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    exact = {name: weight.double() for name, weight in weights.items()}
    want = kernel("experts", "reference")(step(tokens), x.double(), routing.double(), chosen, **exact, **attributes)
    got = kernel("experts", "cpu")(step(tokens), x, routing, chosen, **weights, **attributes)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def gpt_oss(weights: dict[str, torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    config = SimpleNamespace(
        **BASE, intermediate_size=5, swiglu_alpha=1.702, swiglu_limit=0.7, _experts_implementation="eager"
    )
    module = GptOssExperts(config)

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=1)
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    module.gate_up_proj.copy_(interleaved(weights["up"]).transpose(1, 2))
    module.gate_up_proj_bias.copy_(interleaved(weights["up_bias"]))
    module.down_proj.copy_(weights["down"].transpose(1, 2))
    module.down_proj_bias.copy_(weights["down_bias"])
    x, routing, chosen = operands
    return module(x, chosen, routing)


@torch.no_grad()
def nemotron_h(weights: dict[str, torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    config = SimpleNamespace(
        n_routed_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=5, moe_latent_size=None,
        mlp_hidden_act="relu2", _experts_implementation="eager",
    )  # fmt: skip
    module = NemotronHExperts(config)
    module.up_proj.copy_(weights["up"])
    module.down_proj.copy_(weights["down"])
    x, routing, chosen = operands
    return module(x, chosen, routing)


@pytest.mark.parametrize(
    ("oracle", "bias", "attributes"),
    [
        (gpt_oss, True, {"activation": "swiglu_oai", "clamp": 0.7}),
        (nemotron_h, False, {"activation": "relu2", "gated": False}),
    ],
)
def test_experts_are_those_of_transformers(
    oracle: Callable[..., torch.Tensor], bias: bool, attributes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    weights = random_experts(attributes.get("gated", True), bias)
    x, routing = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K)
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    ours = kernel("experts", "cpu")(step(TOKENS), x, routing, chosen, **weights, **attributes)
    torch.testing.assert_close(ours, oracle(weights, x, routing, chosen), rtol=1e-5, atol=1e-5)


def test_experts_that_do_not_fit_are_refused_and_cost_what_they_multiply() -> None:
    shapes = {"up": (8, 10, 6), "plain_up": (8, 5, 6), "down": (8, 6, 5), "up_bias": (8, 9), "down_bias": (8, 6)}
    program = Program(weights={name: TensorSpec(shape) for name, shape in shapes.items()})
    x = program.add_input("x", TensorSpec(("T", 6)))
    routing = program.add_input("routing", TensorSpec(("T", 3)))
    chosen = program.add_input("chosen", TensorSpec(("T", 3), "int64"))

    def call(name: str, weights: dict[str, str], **attributes: Any) -> None:
        program.call("experts", name, x, routing, chosen, weights=weights, **attributes)

    gated, plain = {"up": "up", "down": "down"}, {"up": "plain_up", "down": "down"}
    call("a", gated, activation="silu")
    call("b", plain, activation="relu2", gated=False)
    load = Load(tokens=2, sequences=1, logits_rows=1)
    assert [program.flops(node, load) for node in program.nodes] == [2 * 3 * 2 * 6 * 5 * n for n in (3, 2)]
    for weights, attributes, message in [
        (plain, {"activation": "silu"}, r"up \(8, 5, 6\) does not fit down"),
        (gated, {"activation": "relu2", "gated": False}, r"up \(8, 10, 6\) does not fit down"),
        (gated | {"up_bias": "up_bias", "down_bias": "down_bias"}, {"activation": "silu"}, r"up_bias \(8, 9\) does"),
        (plain, {"activation": "swiglu_oai", "gated": False}, "activation 'swiglu_oai' is not one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            call("c", weights, **attributes)
