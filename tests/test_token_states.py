"""States inside a row, which linear attention leaves in slots of their own, so that drafts are rolled back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_linear_attention import RULES, Tensors, operands

from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel
from hybridtrt.plugins.step import MOST_TOKEN_SLOTS, StepBatch

KEY_HEADS, HEADS, K, V = 1, 2, 12, 20
WALKERS = ("reference", "torch", "cpu", "gpu")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # of the states, and how near they must be


def batch_of(lengths: list[int], asks: list[bool], seed: int = 0) -> tuple[StepBatch, int]:
    """Rows in scattered slots, of which some ask for the states after their tokens but for every third; and the number
    of slots. The last row overwrites its state; the first one's first token leaves one where the row's was."""
    rng = np.random.default_rng(seed)
    tokens, count = sum(lengths), len(lengths)
    slots = rng.permutation(np.arange(1, 2 * count + tokens + 4)).astype(np.int32)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    asked = np.concatenate([[ask and i % 3 != 1 for i in range(n)] for n, ask in zip(lengths, asks, strict=True)])
    token_slots = np.where(asked, slots[2 * count :][:tokens], 0).astype(np.int32)
    if asks[0]:
        token_slots[0] = slots[0]
    zeros = np.zeros(tokens, np.int32)
    batch = StepBatch(
        input_ids=zeros,
        positions=zeros,
        cu_seqlens=ends,
        context_lens=np.zeros(count, np.int32),
        state_src=slots[:count],
        state_dst=np.append(slots[count : 2 * count - 1], slots[count - 1]),
        logits_indices=zeros[:0],
        token_slots=token_slots,
    )
    return batch, len(slots) + 1


def pool(batch: StepBatch, slots: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random states where a row reads one, NaN everywhere else."""
    state = torch.full((slots, HEADS, K, V), torch.nan, dtype=dtype)
    state[batch.state_src] = torch.randn(len(batch.state_src), HEADS, K, V).to(dtype)
    return state


def run(
    walker: str,
    batch: StepBatch,
    inputs: list[torch.Tensor],
    weights: Tensors,
    attributes: dict[str, Any],
    state: torch.Tensor,
) -> torch.Tensor:
    """Outputs; the reference computes in float64."""
    if walker == "reference":
        inputs, weights = [x.double() for x in inputs], {name: x.double() for name, x in weights.items()}
    out: torch.Tensor = kernel("linear_attention", walker)(Step(batch), *inputs, **weights, state=state, **attributes)
    return out


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """NaN at the same places, else within a share of the greatest number there."""
    assert torch.equal(got.isnan(), want.isnan())
    difference = (got.double() - want.double()).nan_to_num(0.0).abs().max()
    assert difference <= tolerance * want.double().nan_to_num(0.0).abs().max()


@pytest.mark.parametrize(
    ("rule", "dtype"), [*((rule, torch.float32) for rule in RULES), ("gated_delta", torch.bfloat16)]
)
@pytest.mark.parametrize("walker", WALKERS)
def test_the_state_after_a_token_is_that_of_the_row_cut_there(walker: str, rule: str, dtype: torch.dtype) -> None:
    """By the definition, which runs each prefix of each row alone. Nothing else is written, slot 0 least of all."""
    torch.manual_seed(0)
    lengths = [4, 1, MOST_TOKEN_SLOTS + 1, MOST_TOKEN_SLOTS, 1, 2]
    asks = [True, True, False, True, False, False]
    batch, slots = batch_of(lengths, asks)
    given = operands(rule, sum(lengths), KEY_HEADS, HEADS, K, V)
    initial = pool(batch, slots, dtype)
    want = initial.double()
    outputs = []
    for row, (start, length) in enumerate(zip(batch.cu_seqlens, lengths, strict=False)):
        for n in range(1, length + 1):
            slot = batch.state_dst[row] if n == length else 0
            wanted = {int(slot), int(batch.token_slots[start + n - 1])} - {0}
            if not wanted:
                continue
            alone = initial.double()
            prefix = replace(
                batch_of([n], [False])[0],
                state_src=batch.state_src[row : row + 1],
                state_dst=np.array([min(wanted)], np.int32),
                token_slots=None,
            )
            out = run("reference", prefix, [x[start : start + n] for x in given[0]], *given[1:], alone)
            want[sorted(wanted)] = alone[min(wanted)]
        outputs.append(out)
    state = initial.clone()
    got = run(walker, batch, *given, state)
    assert_near(got, torch.cat(outputs), 1e-5)
    assert_near(state, want, DTYPES[dtype])
    untouched = want.isnan().flatten(1).all(1)
    assert untouched[0]
    assert (
        untouched.sum() == slots - len(set(np.concatenate([batch.state_src, batch.state_dst, batch.token_slots]))) + 1
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("walker", WALKERS)
def test_drafts_are_rolled_back_to_the_state_of_the_last_right_one(walker: str, rule: str) -> None:
    """A step over 5 tokens of which 3 are kept, then 2 others from the slot of the third: as 3 and 2 without drafts."""
    torch.manual_seed(1)
    inputs, weights, attributes = operands(rule, 7, KEY_HEADS, HEADS, K, V)
    drafts, right, others = slice(0, 5), slice(0, 3), slice(5, 7)

    def row(n: int, source: int, target: int, token_slots: list[int] | None = None) -> StepBatch:
        batch, _ = batch_of([n], [False])
        ends = {"state_src": np.array([source], np.int32), "state_dst": np.array([target], np.int32)}
        return replace(batch, **ends, token_slots=None if token_slots is None else np.array(token_slots, np.int32))

    def step(batch: StepBatch, tokens: slice, state: torch.Tensor) -> torch.Tensor:
        return run(walker, batch, [x[tokens] for x in inputs], weights, attributes, state)

    start = torch.full((8, HEADS, K, V), torch.nan)
    start[1] = torch.randn(HEADS, K, V)
    plain, rolled_back = start.clone(), start.clone()
    step(row(3, 1, 2), right, plain)
    want = step(row(2, 2, 3), others, plain)
    step(row(5, 1, 7, [4, 6, 5, 2, 0]), drafts, rolled_back)
    got = step(row(2, 5, 3), others, rolled_back)
    assert_near(got, want, 2e-5)
    assert_near(rolled_back[3], plain[3], 2e-5)
    assert torch.equal(rolled_back[1], start[1])


@pytest.mark.parametrize("rule", ["gated_delta", "delta_channels"])
@pytest.mark.parametrize("walker", WALKERS)
def test_asking_changes_nothing_else(walker: str, rule: str) -> None:
    """Results and other states are to the bit those of a step in which nobody asks, and of one that has no slots."""
    torch.manual_seed(2)
    lengths = [1, MOST_TOKEN_SLOTS + 1, 1]
    given = operands(rule, sum(lengths), KEY_HEADS, HEADS, K, V)
    batch, slots = batch_of(lengths, [True, False, False])
    initial = pool(batch, slots)
    found = []
    for token_slots in (batch.token_slots, np.zeros_like(batch.token_slots), None):
        state = initial.clone()
        out = run(walker, replace(batch, token_slots=token_slots), *given, state)
        found.append(torch.cat([out.flatten(), state[batch.state_dst].flatten()]))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("lengths", "token_slots", "message"),
    [
        ([3, 2], [1, 2, 3, 4], "token_slots has 4 slots in a step of 5 tokens"),
        ([2, 17], [1, 2] + [0] * 16 + [3], "asks for states in a row of 17 tokens; 16 at most have any"),
        ([16, 17], [1] * 16 + [0] * 17, None),
    ],
)
def test_what_cannot_be_asked_for(lengths: list[int], token_slots: list[int], message: str | None) -> None:
    batch, _ = batch_of(lengths, [False] * len(lengths))
    if message is None:
        replace(batch, token_slots=np.array(token_slots, np.int32))
        return
    with pytest.raises(ValueError, match=message):
        replace(batch, token_slots=np.array(token_slots, np.int32))
