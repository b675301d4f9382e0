"""The selective scan in the Triton language, where the tests of all kernels do not reach."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import selective_scan
from test_gpu_ssd import Operands, assert_close, rows

from hybridtrt.plugins.gpu.plan import plan
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel

CHUNK = 8
CHANNELS, GROUPS, SIZE = 6, 2, 3


def inputs(tokens: int, groups: int = GROUPS) -> list[torch.Tensor]:
    return [torch.randn(tokens, *shape) for shape in ((CHANNELS,), (CHANNELS,), (groups, SIZE), (groups, SIZE))]


def weights() -> Operands:
    return {"A_log": torch.randn(CHANNELS, SIZE) * 0.5, "D": torch.randn(CHANNELS), "dt_bias": torch.randn(CHANNELS)}


def run(
    walker: str, step: Step, operands: list[torch.Tensor], named: Operands, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    state = state.clone()
    return kernel("selective_scan", walker)(step, *operands, **named, state=state), state


def as_defined(step: Step, operands: list[torch.Tensor], named: Operands, state: torch.Tensor, allowed: float) -> None:
    exact = [x.double() for x in operands]
    doubles = {name: weight.double() for name, weight in named.items()}
    want = run("reference", step, exact, doubles, state.double())
    got = run("gpu", step, operands, named, state)
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, allowed)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float16, 1e-3)])
def test_about_a_chunk(dtype: torch.dtype, allowed: float) -> None:
    """From a state and into another slot; slots that no row has are NaN, and two rows read one."""
    torch.manual_seed(0)
    lengths = [CHUNK - 1, CHUNK, 1, CHUNK + 1]
    state = torch.full((8, CHANNELS, SIZE), torch.nan)
    state[[2, 3, 7]] = torch.randn(3, CHANNELS, SIZE)
    operands = [x.to(dtype) for x in inputs(sum(lengths))]
    as_defined(rows(lengths, [2, 3, 2, 7], [1, 3, 4, 6]), operands, weights(), state, allowed)


@pytest.mark.parametrize("rate", [-30.0, 0.0, 7.0, 200.0])
def test_decay_of_any_strength(rate: float) -> None:
    """From none to one that leaves nothing, and beyond the range of float32, at steps from nearly 0 to large ones."""
    torch.manual_seed(1)
    operands = inputs(19)
    operands[1] = torch.randn(19, CHANNELS) * 3 + torch.tensor([-20.0, -5.0, 0.0, 3.0, 10.0, 30.0])
    named = weights() | {"A_log": torch.full((CHANNELS, SIZE), rate)}
    as_defined(rows([18, 1], [1, 2], [1, 2]), operands, named, torch.randn(3, CHANNELS, SIZE), 1e-5)


def test_a_row_is_the_same_in_any_batch() -> None:
    torch.manual_seed(2)
    named, operands, state = weights(), inputs(10 + 1 + 17), torch.randn(5, CHANNELS, SIZE)
    out, states = run("gpu", rows([10, 1, 17], [1, 2, 3], [1, 2, 3]), operands, named, state)
    for slot, (first, end) in enumerate([(0, 10), (10, 11), (11, 28)], 1):
        alone = run("gpu", rows([end - first], [slot], [4]), [x[first:end] for x in operands], named, state)
        assert torch.equal(out[first:end], alone[0])
        assert torch.equal(states[slot], alone[1][4])


def test_more_channels_than_a_program_has() -> None:
    torch.manual_seed(3)
    channels, size = 40, 20
    operands = [torch.randn(3, *shape) for shape in ((channels,), (channels,), (1, size), (1, size))]
    named = {"A_log": torch.randn(channels, size), "D": torch.randn(channels), "dt_bias": torch.randn(channels)}
    as_defined(rows([2, 1], [1, 2], [1, 2]), operands, named, torch.randn(3, channels, size), 1e-5)


def test_sizes_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"selective_scan \(selective_scan\): state size 256 is not in 1\.\.128"):
        plan(selective_scan(64, 1, 256))
