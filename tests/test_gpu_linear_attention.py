"""Linear attention in the Triton language: ends of chunks, head dims, decays of any strength, one row among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from steps import make_batch, place

from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel

Tensors = dict[str, torch.Tensor]
RULES = ("linear", "gated", "delta", "gated_delta", "channels", "delta_channels", "constant")


def operands(
    rule: str, tokens: int, key_heads: int, heads: int, K: int, V: int
) -> tuple[list[torch.Tensor], Tensors, dict[str, Any]]:
    """Random inputs, weights and attributes. Keys are short where nothing normalises them: sums stay small."""
    gate: tuple[int, ...] = (heads, K) if "channels" in rule else (heads,)
    gated = rule not in ("linear", "delta")
    inputs = [torch.randn(tokens, key_heads, K), torch.randn(tokens, key_heads, K), torch.randn(tokens, heads, V)]
    inputs += [torch.randn(tokens, *gate)] if gated and rule != "constant" else []
    inputs += [torch.randn(tokens, heads)] if "delta" in rule else []
    weights = {"A_log": torch.randn(heads) * 0.5} if gated else {}
    weights |= {"dt_bias": torch.randn(gate)} if gated and rule != "constant" else {}
    name = {"channels": "gated", "constant": "gated", "delta_channels": "gated_delta"}.get(rule, rule)
    return inputs, weights, {"rule": name, "scale": K**-0.5, "l2_norm": True}


def rows(lengths: list[int]) -> Step:
    """Rows of the given lengths in random slots, of a pool of len(lengths) + 3."""
    placement = place(lengths, 4, np.random.default_rng(len(lengths)))
    return Step(make_batch([(s, 0, n) for s, n in enumerate(lengths)], [[0] * n for n in lengths], placement))


def compare(
    step: Step,
    inputs: list[torch.Tensor],
    weights: Tensors,
    attributes: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    """Outputs and states against the definition in float64, within a share of the greatest number there."""
    inputs = [x.to(dtype) for x in inputs]
    heads, V = inputs[2].shape[1:]
    state = torch.randn(step.num_sequences + 3, heads, inputs[1].shape[2], V)
    exact = state.double()
    doubles = [x.double() for x in inputs], {name: weight.double() for name, weight in weights.items()}
    want = kernel("linear_attention", "reference")(step, *doubles[0], **doubles[1], state=exact, **attributes)
    got = kernel("linear_attention", "gpu")(step, *inputs, **weights, state=state, **attributes)
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
    assert (state.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("rule", RULES)
def test_ends_of_chunks(rule: str) -> None:
    torch.manual_seed(0)
    lengths = [31, 1, 33, 32]
    compare(rows(lengths), *operands(rule, sum(lengths), 1, 1, 16, 16))


@pytest.mark.parametrize("rule", ["gated_delta", "delta_channels"])
def test_chunks_in_float16(rule: str) -> None:
    """Where activations have 16 bits, chunks are longer; what a bit of them is sets the tolerance."""
    torch.manual_seed(1)
    lengths = [63, 65, 64]
    compare(rows(lengths), *operands(rule, sum(lengths), 1, 1, 16, 16), torch.float16, 3e-3)


@pytest.mark.parametrize(("K", "V"), [(24, 32), (32, 24), (3, 5), (80, 17), (144, 40), (256, 16)])
def test_head_dims(K: int, V: int) -> None:
    torch.manual_seed(2)
    for rule in ("gated_delta", "delta_channels"):
        compare(rows([34, 1]), *operands(rule, 35, 1, 2 if K == 24 else 1, K, V))


@pytest.mark.parametrize("rule", ["gated", "gated_delta", "channels", "delta_channels"])
@pytest.mark.parametrize("rate", [1e-6, 1.0, 1e3])
def test_decay_of_any_strength(rule: str, rate: float) -> None:
    """From none to one that leaves nothing, in turn and side by side: no exponent overflows, and none loses digits."""
    torch.manual_seed(3)
    inputs, weights, attributes = operands(rule, 75, 1, 1, 16, 16)
    inputs[3] = (
        inputs[3] * 6.0 + torch.tensor([-40.0, -10.0, 0.0, 3.0, 30.0, 60.0])[torch.randint(0, 6, inputs[3].shape)]
    )
    weights["A_log"] = torch.full((1,), rate).log()
    compare(rows([70, 5]), inputs, weights, attributes)


@pytest.mark.parametrize("rule", ["gated_delta", "delta_channels"])
def test_keys_that_are_all_the_same(rule: str) -> None:
    """The hardest system for the delta rule: its inverse stays small while the powers of its matrix are huge."""
    torch.manual_seed(4)
    inputs, weights, attributes = operands(rule, 64, 1, 1, 16, 16)
    inputs[1][:] = inputs[1][0]
    inputs[3][:], inputs[4][:] = -30.0, 30.0
    compare(rows([64]), inputs, weights, attributes)


@pytest.mark.parametrize("rule", ["gated_delta", "delta_channels"])
def test_a_row_does_not_depend_on_the_others(rule: str) -> None:
    torch.manual_seed(5)
    lengths = [3, 35, 1, 2]
    inputs, weights, attributes = operands(rule, sum(lengths), 1, 1, 16, 16)
    state = torch.randn(8, 1, 16, 16)
    function = kernel("linear_attention", "gpu")
    batch = make_batch(
        [(s, 0, n) for s, n in enumerate(lengths)],
        [[0] * n for n in lengths],
        place(lengths, 4, np.random.default_rng(0)),
    )
    together = state.clone()
    out = function(Step(batch), *inputs, **weights, state=together, **attributes)
    for row, start in enumerate(batch.cu_seqlens[:-1].tolist()):
        end, slot = start + lengths[row], int(batch.state_src[row])
        placement = place([lengths[row]], 4, np.random.default_rng(0))
        placement.slots = [slot]
        alone = state.clone()
        single = Step(make_batch([(0, 0, lengths[row])], [[0] * lengths[row]], placement))
        mine = function(single, *(x[start:end] for x in inputs), **weights, state=alone, **attributes)
        assert torch.equal(mine, out[start:end])
        assert torch.equal(alone[slot], together[slot])


@pytest.mark.parametrize(("K", "V", "message"), [(257, 8, "key head dim 257"), (8, 512, "value head dim 512")])
def test_head_dims_that_are_refused(K: int, V: int, message: str) -> None:
    inputs, weights, attributes = operands("linear", 1, 1, 1, K, V)
    with pytest.raises(ValueError, match=rf"linear_attention.*{message} is not in 1\.\.256"):
        kernel("linear_attention", "gpu")(rows([1]), *inputs, **weights, state=torch.zeros(4, 1, K, V), **attributes)
