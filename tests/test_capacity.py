"""Expert capacity: every walker against a plain definition, what always holds of it, and whole models with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from engines import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_experts import ROUTERS

from hybridtrt.build.engine import EngineConfig, read_engine_config
from hybridtrt.plugins.capacity import expert_capacity
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import WALKERS, kernel
from hybridtrt.plugins.spec import TensorSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.forward import full_logits, prefill_steps
from hybridtrt.runtime.load import RuntimeOptions, make_runner, open_packed, runner_info
from hybridtrt.runtime.runner import Runner, TracingRunner

FACTORS = st.sampled_from([0.01, 0.3, 0.5, 1.0, 1.1, 1.25, 1.5, 2.0, 7.0, 1e300])
OVERFLOWS = st.sampled_from(["drop", "next_best"])
MOE_VARIANTS = ("qwen3_next", "jamba", "granitemoehybrid", "deepseek_v3", "gpt_oss", "phimoe", "zaya", "nemotron_h")


@dataclass(frozen=True)
class Case:
    """Rows of so many tokens, each real or padding, and the order of their experts."""

    rows: tuple[tuple[int, bool], ...]
    weights: torch.Tensor  # [T, ranked]
    order: torch.Tensor  # [T, ranked]; numbers from `experts` on are none
    top_k: int
    experts: int
    factor: float
    overflow: str
    by_page: bool  # real rows have a page, else a slot

    @property
    def real(self) -> list[bool]:
        """Of each token; where all rows look like padding, none is."""
        found = [real for length, real in self.rows for _ in range(length)]
        return found if any(found) else [True] * len(found)

    def step(self) -> Step:
        lengths = [length for length, _ in self.rows]
        places = np.array([real * (1 + row) for row, (_, real) in enumerate(self.rows)], np.int32)
        slots = np.zeros_like(places) if self.by_page else places
        tables = np.stack([np.zeros_like(places), places], 1)  # the first page is before the window
        return Step(
            StepBatch(
                input_ids=np.zeros(sum(lengths), np.int32),
                positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
                cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
                context_lens=np.zeros(len(lengths), np.int32),
                state_src=slots,
                state_dst=slots,
                logits_indices=np.zeros(0, np.int32),
                block_tables={"window": tables[:, :1] * 0, "g": tables} if self.by_page else {},
            )
        )

    def run(self, walker: str) -> tuple[torch.Tensor, ...]:
        limits = {"top_k": self.top_k, "num_experts": self.experts, "factor": self.factor, "overflow": self.overflow}
        found: tuple[torch.Tensor, ...] = kernel("capacity", walker)(self.step(), self.weights, self.order, **limits)
        return found


@st.composite
def cases(draw: st.DrawFn, overflow: st.SearchStrategy[str] = OVERFLOWS) -> Case:
    experts = draw(st.integers(1, 9))
    classes = experts + draw(st.booleans())
    top_k = draw(st.integers(1, classes))
    ranked = draw(st.integers(top_k, classes))
    rows = draw(
        st.lists(st.tuples(st.integers(1, 6), st.sampled_from([True, True, True, False])), min_size=1, max_size=5)
    )
    tokens = sum(length for length, _ in rows)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    few = [0.0, -0.0, 0.25, 0.5, 0.5, 1.0, 3.0, -0.5, math.nan, math.inf, -math.inf]
    levels = draw(st.sampled_from([few, rng.random(200).tolist(), [0.5]]))
    skewed = np.argsort(rng.random((tokens, classes)) - draw(st.sampled_from([0, 1])) * np.arange(classes) / 3, 1)
    return Case(
        rows=tuple(rows),
        weights=torch.tensor(rng.choice(levels, (tokens, ranked)), dtype=torch.float32),
        order=torch.from_numpy(skewed[:, :ranked].copy()),
        top_k=top_k,
        experts=experts,
        factor=draw(FACTORS),
        overflow=draw(overflow),
        by_page=draw(st.booleans()),
    )


def defined(case: Case) -> tuple[NDArray[np.float32], NDArray[np.int64], list[int], list[int]]:
    """A pair keeps its place if fewer than `capacity` stand before it; those that do not go on one after another."""
    weights, order, k, experts = case.weights.numpy(), case.order.numpy(), case.top_k, case.experts
    tokens = sum(case.real)
    capacity = min(tokens, math.ceil(Fraction(case.factor).limit_denominator(1000) * tokens * k / experts))
    if case.factor == 1e300:
        capacity = tokens
    pairs = [(t, j) for t in range(len(order)) if case.real[t] for j in range(k)]

    def before(a: tuple[int, int], b: tuple[int, int]) -> bool:
        one, other = (-math.inf if math.isnan(weights[pair]) else float(weights[pair]) for pair in (a, b))
        return one > other or (one == other and a < b)

    kept = {
        p: p
        for p in pairs
        if order[p] >= experts or sum(order[q] == order[p] and before(q, p) for q in pairs) < capacity
    }
    lost = [p for p in pairs if p not in kept]
    overflow = [sum(order[p] == expert for p in lost) for expert in range(experts)]
    while case.overflow == "next_best" and lost:
        (first,) = [p for p in lost if not any(before(q, p) for q in lost)]
        lost.remove(first)
        for place in range(k, order.shape[1]):
            at = (first[0], place)
            full = order[at] < experts and sum(order[other] == order[at] for other in kept.values()) >= capacity
            if at not in kept.values() and not full:
                kept[first] = at
                break
    result, numbers = np.zeros((len(order), k), np.float32), np.full((len(order), k), experts)
    for pair, at in kept.items():
        result[pair], numbers[pair] = weights[at], order[at]
    return result, numbers, [sum(order[at] == e for at in kept.values()) for e in range(experts)], overflow


@pytest.mark.parametrize("walker", WALKERS)
@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_every_walker_does_as_defined(walker: str, case: Case) -> None:
    weights, numbers, load, overflow = case.run(walker)
    expected = defined(case)
    np.testing.assert_array_equal(weights.numpy(), expected[0])
    np.testing.assert_array_equal(numbers.numpy(), expected[1])
    assert (load.tolist(), overflow.tolist()) == expected[2:]
    assert load.dtype == overflow.dtype == torch.int32


@pytest.mark.parametrize("walker", WALKERS)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_what_always_holds(walker: str, case: Case) -> None:
    _, numbers, load, overflow = case.run(walker)
    tokens = sum(case.real)
    most = expert_capacity(case.factor, tokens, case.top_k, case.experts)
    assert int(load.max()) <= most <= tokens
    asked = [
        expert
        for real, row in zip(case.real, case.order[:, : case.top_k].tolist(), strict=True)
        if real
        for expert in row
    ]
    placed = [[expert for expert in row if expert < case.experts] for row in numbers.tolist()]
    assert all(len(set(row)) == len(row) for row in placed)
    assert not any(row for row, real in zip(placed, case.real, strict=True) if not real)
    wanted = torch.tensor(asked).bincount(minlength=case.experts)[: case.experts]
    assert torch.equal(overflow, (wanted - most).clamp(min=0).int())
    assert load.tolist() == [sum(e in row for row in placed) for e in range(case.experts)]
    if case.overflow == "drop":
        assert torch.equal(load + overflow, wanted.int())
        return
    for real, order, row in zip(case.real, case.order.tolist(), numbers.tolist(), strict=True):
        if real and len([e for e in row if e < case.experts]) + (case.experts in order) < case.top_k:
            assert all(load[expert] == most for expert in order if expert < case.experts and expert not in row)


@pytest.mark.parametrize("walker", WALKERS)
@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_room_for_all_changes_nothing(walker: str, case: Case) -> None:
    case = replace(case, factor=float(case.experts), rows=tuple((length, True) for length, _ in case.rows))
    weights, numbers, _, overflow = case.run(walker)
    torch.testing.assert_close(weights, case.weights[:, : case.top_k], rtol=0, atol=0, equal_nan=True)
    none = case.order[:, : case.top_k]
    assert torch.equal(numbers, none)
    assert not overflow.any()


@pytest.mark.parametrize("walker", WALKERS)
@given(case=cases(st.just("drop")), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_tokens_decides_only_between_equals(walker: str, case: Case, seed: int) -> None:
    tokens = len(case.weights)
    distinct = torch.from_numpy(np.random.default_rng(seed).permutation(case.weights.numel())).view_as(case.weights)
    case = replace(case, rows=((tokens, True),), weights=1.0 + distinct)
    shuffled = torch.from_numpy(np.random.default_rng(seed).permutation(tokens))
    there = replace(case, weights=case.weights[shuffled], order=case.order[shuffled]).run(walker)
    here = case.run(walker)
    for a, b in zip(there[:2], here[:2], strict=True):
        assert torch.equal(a, b[shuffled])
    for a, b in zip(there[2:], here[2:], strict=True):
        assert torch.equal(a, b)


def test_capacity_of_an_expert() -> None:
    for tokens in range(40):
        for factor in ("0.1", "1.1", "1.25", "1.5", "2.2"):
            for k, experts in ((1, 1), (2, 11), (3, 10), (8, 64), (10, 512)):
                exact = min(tokens, math.ceil(Fraction(factor) * tokens * k / experts))
                assert expert_capacity(float(factor), tokens, k, experts) == exact


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        (((4,), (5,)), {}, "weights .* and experts .* differ"),
        (((4,), (4,)), {"top_k": 5}, r"top_k=5 is not in 1\.\.4"),
        (((4,), (4,)), {"factor": 0.0}, "factor 0.0 is not a positive number"),
        (((4,), (4,)), {"factor": math.inf}, "factor inf is not a positive number"),
        (((4,), (4,)), {"overflow": "wait"}, "overflow 'wait' is not one of"),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: tuple[tuple[int, ...], ...], attributes: dict[str, object], message: str
) -> None:
    program = Program()
    inputs = [program.add_input(f"x{i}", TensorSpec(("T", *shape))) for i, shape in enumerate(shapes)]
    limits = {"top_k": 2, "num_experts": 8, "factor": 1.0, "overflow": "drop"} | attributes
    with pytest.raises(ValueError, match=rf"c \(capacity\): {message}"):
        program.call("capacity", "c", *inputs, **limits)


RANKED = {name: attributes for name, (*_, attributes) in ROUTERS.items()} | {
    "jamba": {"scoring": "softmax"},
    "phimoe": {"scoring": "sparsemixer", "jitter_eps": 0.3},
    "biased": {"scoring": "sigmoid", "selection_bias": True, "renormalize": True, "scaling": 2.5},
    "biased.softmax": {"scoring": "softmax", "selection_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("name", RANKED)
def test_router_goes_on_where_it_is_asked_to(name: str, experts: int, walker: str) -> None:
    """The first k stay as they are to the bit; the others follow in order, each weighted as its score says."""
    torch.manual_seed(1)
    tokens, k = 30, 2
    logits, attributes = torch.randn(tokens, experts), dict(RANKED[name])
    biased = {"selection_bias": torch.randn(experts)} if attributes.pop("selection_bias", False) else {}
    groups = attributes.get("num_groups", 1)
    most = experts // groups * attributes.get("top_groups", 1)
    case = Case(((tokens, True),), logits, logits, k, experts, 1.0, "drop", False)
    route = kernel("router", walker)
    weights, numbers = route(case.step(), logits, **biased, top_k=k, num_ranked=most, **attributes)
    first = route(case.step(), logits, **biased, top_k=k, **attributes)
    assert torch.equal(weights[:, :k], first[0])
    assert torch.equal(numbers[:, :k], first[1])
    assert weights.shape == numbers.shape == (tokens, most)
    assert all(len(set(row)) == most for row in numbers.tolist())
    scores = logits.sigmoid() if attributes["scoring"] == "sigmoid" else logits.softmax(-1)
    ranked = scores.gather(1, numbers)
    preference = (scores + biased["selection_bias"] if biased else scores).gather(1, numbers)
    assert (preference.diff(dim=1) <= 0).all()
    if attributes["scoring"] != "sparsemixer":  # every weight is the score by one factor of the token
        torch.testing.assert_close(weights, ranked * (weights[:, :1] / ranked[:, :1]), rtol=1e-4, atol=1e-6)
        return
    left = logits.clone()
    for place in range(most):  # as if the token had already had its better experts
        best, expert = left.max(1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * attributes["jitter_eps"]
        part = left.exp().masked_fill(far, 0.0)
        torch.testing.assert_close(weights[:, place : place + 1], (part / part.sum(1, keepdim=True)).gather(1, expert))
        left.scatter_(1, expert, -torch.inf)


@cache
def runner(
    variant: str, walker: str = "cpu", factor: float | None = None, overflow: str | None = None, threads: int = 1
) -> Runner:
    """A tiny engine as if it had been built with this capacity."""
    folder = tiny_engine(variant)
    config = read_engine_config(folder)
    bound = replace(config.build, moe_capacity_factor=factor, moe_overflow=overflow)
    config = EngineConfig(config.model, bound)
    options = RuntimeOptions(walker=walker, threads=threads)
    return make_runner(config, open_packed(folder, config), runner_info(config, options), options)


def ids_of(variant: str, count: int = 60) -> list[int]:
    return np.random.default_rng(3).integers(0, runner(variant).info.vocab_size, count).tolist()


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("overflow", ["drop", "next_best"])
@pytest.mark.parametrize("variant", MOE_VARIANTS)
def test_model_with_room_for_all_is_the_model(variant: str, overflow: str, walker: str) -> None:
    ids = ids_of(variant, 20)
    np.testing.assert_array_equal(
        full_logits(runner(variant, walker, 1e6, overflow), ids), full_logits(runner(variant, walker), ids)
    )


@pytest.mark.parametrize("overflow", ["drop", "next_best"])
@pytest.mark.parametrize("variant", MOE_VARIANTS)
def test_model_with_little_room(variant: str, overflow: str) -> None:
    """Another result than the model's, the same each time, with any number of threads and by every walker."""
    ids, bound = ids_of(variant), runner(variant, "cpu", 0.5, overflow)
    logits = full_logits(bound, ids)
    assert np.isfinite(logits).all()
    assert np.abs(logits - full_logits(runner(variant), ids)).max() > 1e-2 * logits.std()
    np.testing.assert_array_equal(full_logits(bound, ids), logits)
    np.testing.assert_array_equal(full_logits(runner(variant, "cpu", 0.5, overflow, threads=3), ids), logits)
    for walker in ("reference", "torch"):
        other = full_logits(runner(variant, walker, 0.5, overflow), ids)
        assert np.abs(other - logits).max() < 1e-4 * logits.std()


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("overflow", ["drop", "next_best"])
def test_counters_of_a_step(overflow: str, walker: str) -> None:
    """Traced with what they count; a step of another size has its own capacity."""
    bound = runner("qwen3_next", walker, 0.75, overflow)
    assert isinstance(bound, TracingRunner)
    nodes = [node for node in bound.program.nodes if node.op == "capacity"]
    assert nodes
    bound.clear_slots([1])
    for batch in prefill_steps(bound.info, ids_of("qwen3_next", 50), 20):
        values = bound.trace(batch, [name for node in nodes for name in (*node.inputs, *node.outputs)])
        for node in nodes:
            order, (_, numbers, load, refused) = values[node.inputs[1]], (values[name] for name in node.outputs)
            k, experts = node.attributes["top_k"], node.attributes["num_experts"]
            most = expert_capacity(0.75, batch.num_tokens, k, experts)
            asked = np.bincount(order[:, :k].astype(int).ravel(), minlength=experts)
            np.testing.assert_array_equal(load, np.bincount(numbers.astype(int).ravel(), minlength=experts)[:experts])
            np.testing.assert_array_equal(refused, np.maximum(asked - most, 0))
            assert load.max() <= most
            assert refused.any()


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("variant", ["qwen3_next", "gpt_oss"])
def test_padding_takes_no_place_in_a_model(variant: str, walker: str) -> None:
    """A row without slot and pages changes nothing for the others, wherever it stands."""
    bound, ids = runner(variant, walker, 0.5, "next_best"), ids_of(variant, 24)
    (batch,) = prefill_steps(bound.info, ids)
    logits = full_logits(bound, ids)
    bound.clear_slots([1])
    more = ids_of(variant, 7)
    found = bound.step(
        replace(
            batch,
            input_ids=np.array([*more, *ids], np.int32),
            positions=np.concatenate([np.arange(7), np.arange(24)]).astype(np.int32),
            cu_seqlens=np.array([0, 7, 31], np.int32),
            context_lens=np.zeros(2, np.int32),
            state_src=np.array([0, 1], np.int32),
            state_dst=np.array([0, 1], np.int32),
            logits_indices=np.arange(7, 31, dtype=np.int32),
            block_tables={name: np.concatenate([table * 0, table]) for name, table in batch.block_tables.items()},
        )
    )
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4 * logits.std())
