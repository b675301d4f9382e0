"""Recurrences of few models in the Triton language: ends of chunks, sizes, extremes, one row among others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from steps import Placement, make_batch, place

from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel

Tensors = dict[str, torch.Tensor]


@dataclass
class Operands:
    """Of one operator: inputs [tokens, ...] and pools of 9 slots, all random, weights and attributes."""

    op: str
    inputs: list[torch.Tensor]
    pools: Tensors
    weights: Tensors = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def run(self, walker: str, step: Step, dtype: torch.dtype, tokens: slice) -> tuple[torch.Tensor, Tensors]:
        """The result and the pools after it; in float64 all is, else the states are float32."""
        exact = dtype == torch.float64
        pools = {name: pool.to(dtype if exact else torch.float32) for name, pool in self.pools.items()}
        pools = {name: pool.clone() for name, pool in pools.items()}
        inputs = [x[tokens].to(dtype) for x in self.inputs]
        weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        out = kernel(self.op, walker)(step, *inputs, **weights, **pools, **self.attributes)
        return out, pools


def length_routed(tokens: int, heads: int = 2, kv_heads: int = 1, dim: int = 16, limit: int = 3) -> Operands:
    inputs = [torch.randn(tokens, h, dim) for h in (heads, heads, kv_heads, kv_heads)]
    # The normaliser is a sum of positive numbers: its part of the state is so, too.
    pools = {"state": torch.rand(9, kv_heads, dim, dim + 1)}
    return Operands("linear_attention_from", inputs, pools, attributes={"limit": limit})


def low_rank(tokens: int, heads: int = 2, kv_heads: int = 1, dim: int = 16, rank: int = 16) -> Operands:
    inputs = [torch.randn(tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    pools = {"keys": torch.randn(9, kv_heads, dim, rank), "values": torch.randn(9, kv_heads, rank, dim)}
    weights = {"projection": torch.randn(70, rank) * 0.3}
    return Operands("low_rank_attention", inputs, pools, weights, {"scale": 0.3})


def rg_lru(tokens: int, heads: int = 2, width: int = 8) -> Operands:
    gate, channels = (heads, width, width), heads * width
    weights = {"input_gate": torch.randn(gate), "recurrence_gate": torch.randn(gate)}
    weights |= {name: torch.randn(channels) for name in ("input_bias", "recurrence_bias", "decay")}
    return Operands("rg_lru", [torch.randn(tokens, channels)], {"state": torch.randn(9, channels)}, weights)


MAKE = {"linear_attention_from": length_routed, "low_rank_attention": low_rank, "rg_lru": rg_lru}


def rows(lengths: list[int], slots: list[int], contexts: list[int] | None = None) -> Step:
    """Rows that continue sequences of which `contexts` tokens have run."""
    contexts = contexts or [0] * len(lengths)
    placement: Placement = place([c + n for c, n in zip(contexts, lengths, strict=True)], 4, np.random.default_rng(0))
    placement.slots = slots
    pieces = [(s, c, c + n) for s, (c, n) in enumerate(zip(contexts, lengths, strict=True))]
    return Step(make_batch(pieces, [[0] * end for _, _, end in pieces], placement))


def compare(
    operands: Operands, lengths: list[int], dtype: torch.dtype = torch.float32, tolerance: float = 1e-5
) -> None:
    """Against the definition in float64 on what `dtype` holds, within a share of the greatest number there."""
    operands.inputs = [x.to(dtype) for x in operands.inputs]
    operands.weights = {name: weight.to(dtype) for name, weight in operands.weights.items()}
    step = rows(lengths, list(range(1, 1 + len(lengths))), [i % 3 for i in range(len(lengths))])
    want, want_pools = operands.run("reference", step, torch.float64, slice(None))
    got, pools = operands.run("gpu", step, dtype, slice(None))
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
    for name, pool in want_pools.items():
        assert (pools[name].double() - pool).abs().max() <= tolerance * pool.abs().max()


@pytest.mark.parametrize("op", MAKE)
def test_ends_of_chunks(op: str) -> None:
    """Chunks have 16 tokens in float32, and 64 of rg_lru."""
    torch.manual_seed(0)
    lengths = [63, 64, 65, 1] if op == "rg_lru" else [15, 16, 17, 1, 35]
    compare(MAKE[op](sum(lengths)), lengths)


@pytest.mark.parametrize("op", MAKE)
def test_float16(op: str) -> None:
    torch.manual_seed(1)
    lengths = [31, 33, 1]
    compare(MAKE[op](sum(lengths)), lengths, torch.float16, 4e-3)


@pytest.mark.parametrize(
    "operands",
    [
        lambda: length_routed(20, 3, 3, 24),
        lambda: length_routed(20, 4, 2, 32, limit=1),
        lambda: length_routed(20, 1, 1, 128, limit=10**6),
        lambda: low_rank(20, 3, 3, 24, 40),
        lambda: low_rank(20, 4, 2, 5, 3),
        lambda: low_rank(20, 1, 1, 128, 128),
        lambda: rg_lru(20, 1, 70),
        lambda: rg_lru(20, 3, 5),
    ],
)
def test_sizes(operands: Any) -> None:
    torch.manual_seed(2)
    compare(operands(), [18, 1, 1])


def test_gates_of_rg_lru_in_float32() -> None:
    """Weights that are wider than the activations are not rounded to them."""
    torch.manual_seed(6)
    operands = rg_lru(5)
    operands.inputs[0] = operands.inputs[0].half()
    step, state = rows([4, 1], [1, 2]), operands.pools["state"]
    doubles = {name: weight.double() for name, weight in operands.weights.items()}
    exact = state.double()
    kernel("rg_lru", "reference")(step, operands.inputs[0].double(), **doubles, state=exact)
    kernel("rg_lru", "gpu")(step, operands.inputs[0], **operands.weights, state=state)
    torch.testing.assert_close(state.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [-30.0, -12.0, 0.0, 40.0])
def test_rg_lru_of_any_decay(decay: float) -> None:
    """From a state that hardly fades, to which hardly anything is added, to one that is gone after a token."""
    torch.manual_seed(3)
    operands = rg_lru(40)
    operands.weights["decay"][:] = decay
    operands.weights["recurrence_bias"] *= 10.0
    compare(operands, [33, 5, 1, 1])


def test_low_rank_with_scores_far_apart() -> None:
    torch.manual_seed(4)
    operands = low_rank(20)
    operands.pools["keys"] *= 1e4
    compare(operands, [18, 1, 1], tolerance=2e-3)  # scores of 1e5 have a few digits behind the point


@pytest.mark.parametrize("op", MAKE)
def test_a_row_does_not_depend_on_the_others(op: str) -> None:
    torch.manual_seed(5)
    lengths, slots = [19, 3, 1, 2, 1], [4, 2, 7, 1, 5]
    operands = MAKE[op](sum(lengths))
    out, pools = operands.run("gpu", rows(lengths, slots), torch.float32, slice(None))
    start = 0
    for length, slot in zip(lengths, slots, strict=True):
        tokens = slice(start, start + length)
        mine, alone = operands.run("gpu", rows([length], [slot]), torch.float32, tokens)
        pairs = [(mine, out[tokens]), *((alone[name][slot], pool[slot]) for name, pool in pools.items())]
        for a, b in pairs:
            if op == "rg_lru" and start:  # its products are of all rows, and those of numpy vary with the place
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(a, b)
        start += length


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (lambda: length_routed(1, dim=257), r"head dim 257 is not in 1\.\.256"),
        (lambda: length_routed(1, dim=160), "head dim 160 is above 128, the most in float32"),
        (lambda: low_rank(1, dim=300), r"head dim 300 is not in 1\.\.256"),
        (lambda: low_rank(1, rank=300), r"rank 300 is not in 1\.\.256"),
        (lambda: low_rank(1, rank=130), "rank 130 is above 128, the most in float32"),
    ],
)
def test_sizes_that_are_refused(operands: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        operands().run("gpu", rows([1], [1]), torch.float32, slice(None))
