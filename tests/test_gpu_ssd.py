"""State space duality in the Triton language, where the tests of all kernels do not reach: whole chunks, 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_calls import ssd

from hybridtrt.plugins.gpu.plan import plan
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel
from hybridtrt.plugins.step import StepBatch

HEADS, HEAD_DIM, GROUPS, SIZE = 2, 5, 1, 6
Operands = dict[str, torch.Tensor]


def rows(lengths: list[int], sources: list[int], targets: list[int]) -> Step:
    """A step of rows from and to these slots."""
    return Step(
        StepBatch(
            input_ids=np.zeros(sum(lengths), np.int32),
            positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
            cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
            context_lens=np.zeros(len(lengths), np.int32),
            state_src=np.array(sources, np.int32),
            state_dst=np.array(targets, np.int32),
            logits_indices=np.zeros(0, np.int32),
        )
    )


def inputs(tokens: int) -> list[torch.Tensor]:
    shapes = [(HEADS, HEAD_DIM), (HEADS,), (GROUPS, SIZE), (GROUPS, SIZE)]
    return [torch.randn(tokens, *shape) for shape in shapes]


def weights() -> Operands:
    return {name: torch.randn(HEADS) * 0.5 for name in ("A_log", "D", "dt_bias")}


def run(
    walker: str, step: Step, operands: list[torch.Tensor], named: Operands, state: torch.Tensor, **attributes: float
) -> tuple[torch.Tensor, torch.Tensor]:
    state = state.clone()
    return kernel("ssd", walker)(step, *operands, **named, state=state, **attributes), state


def assert_close(got: torch.Tensor, want: torch.Tensor, allowed: float) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=allowed * want[want.isfinite()].abs().max().item(),
                               equal_nan=True)  # fmt: skip


def as_defined(step: Step, operands: list[torch.Tensor], named: Operands, state: torch.Tensor, allowed: float) -> None:
    exact = [x.double() for x in operands]
    doubles = {name: weight.double() for name, weight in named.items()}
    want = run("reference", step, exact, doubles, state.double())
    got = run("gpu", step, operands, named, state)
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, allowed)


@pytest.mark.parametrize(("dtype", "chunk", "allowed"), [(torch.float32, 16, 1e-5), (torch.float16, 64, 2e-3)])
def test_about_a_chunk(dtype: torch.dtype, chunk: int, allowed: float) -> None:
    """From a state and into another slot; slots that no row has are NaN, and two rows read one."""
    torch.manual_seed(0)
    lengths = [chunk - 1, chunk, 1, chunk + 1]
    state = torch.full((8, HEADS, HEAD_DIM, SIZE), torch.nan)
    state[[2, 3, 7]] = torch.randn(3, HEADS, HEAD_DIM, SIZE)
    operands = [x.to(dtype) for x in inputs(sum(lengths))]
    as_defined(rows(lengths, [2, 3, 2, 7], [1, 3, 4, 6]), operands, weights(), state, allowed)


@pytest.mark.parametrize("rate", [1e-6, 1.0, 1e3])
def test_decay_of_any_strength(rate: float) -> None:
    """From none to one that leaves nothing, side by side in the tokens of a chunk."""
    torch.manual_seed(1)
    operands = inputs(39)
    operands[1] = torch.randn(39, HEADS) * 6 + torch.tensor([-40.0, 0.0, 30.0]).repeat(13)[:, None]
    named = {"A_log": torch.full((HEADS,), rate).log(), "D": torch.ones(HEADS), "dt_bias": torch.zeros(HEADS)}
    as_defined(rows([39], [1], [1]), operands, named, torch.randn(2, HEADS, HEAD_DIM, SIZE), 1e-5)


def test_a_row_is_the_same_in_any_batch() -> None:
    torch.manual_seed(2)
    named, operands, state = weights(), inputs(20 + 1 + 33), torch.randn(5, HEADS, HEAD_DIM, SIZE)
    out, states = run("gpu", rows([20, 1, 33], [1, 2, 3], [1, 2, 3]), operands, named, state)
    for slot, (first, end) in enumerate([(0, 20), (20, 21), (21, 54)], 1):
        alone = run("gpu", rows([end - first], [slot], [4]), [x[first:end] for x in operands], named, state)
        assert torch.equal(out[first:end], alone[0])
        assert torch.equal(states[slot], alone[1][4])


def test_sizes_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ssd \(ssd\): head size 257 is not in 1\.\.256"):
        plan(ssd(2, 257, 1, 16))
    with pytest.raises(ValueError, match=r"ssd \(ssd\): state size 512 is not in 1\.\.256"):
        plan(ssd(2, 64, 1, 512))
