"""Attention in the Triton language, run by its interpreter: head sizes, pages, parts, dtypes and rows apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_ops
import torch
from gpu_calls import attention, mla
from numpy.typing import NDArray
from steps import make_batch, place
from test_ops import STATEFUL
from torch import Tensor

from hybridtrt.plugins.attention import gpu
from hybridtrt.plugins.gpu.plan import PLUGINS, plan
from hybridtrt.plugins.mla import gpu as mla_gpu
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel
from hybridtrt.plugins.step import StepBatch

PAGED = [name for name, case in STATEFUL.items() if "kv" in case[3] and case[0] in PLUGINS]


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for programs without keys, too."""
    for module in (gpu, mla_gpu):
        monkeypatch.setattr(module, "PARTS", 2)


def rows_of(contexts: list[int], lengths: list[int], page: int, seed: int = 0) -> StepBatch:
    """A step of rows that have `contexts` tokens before, in shuffled pages of group g."""
    ends = [c + n for c, n in zip(contexts, lengths, strict=True)]
    placement = place(ends, page, np.random.default_rng(seed))
    rows = [(s, c, e) for s, (c, e) in enumerate(zip(contexts, ends, strict=True))]
    return make_batch(rows, [[0] * e for e in ends], placement, ["g"])


def pool_of(batch: StepBatch, page: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random cached tokens of the rows; everything else is NaN."""
    table = batch.block_tables["g"]
    pool = torch.full((int(table.max()) + 1, page, *shape), torch.nan, dtype=dtype)
    for row, context in enumerate(batch.context_lens.tolist()):
        at = np.arange(context)
        pool[table[row, at // page], at % page] = torch.randn(context, *shape).to(dtype)
    return pool


def operands(batch: StepBatch, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    return [torch.randn(batch.num_tokens, count, head_dim) for count in (heads, kv_heads, kv_heads)]


def close(got: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    """Within a bound that is relative to the largest number."""
    assert got.isfinite().all()
    assert (got.double() - want.double()).abs().max() <= bound * want.double().abs().max()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "attributes"),
    [
        (2, 1, 16, 1, {}),
        (6, 2, 24, 16, {"window": 20}),
        (7, 1, 32, 3, {"softcap": 5.0}),
        (2, 2, 80, 8, {}),
        (70, 1, 16, 8, {"window": 3}),
    ],
)
def test_any_heads_and_pages(heads: int, kv_heads: int, head_dim: int, page: int, attributes: dict[str, Any]) -> None:
    """Groups of any size, one larger than a tile; rows of one token and longer ones, with and without a context."""
    torch.manual_seed(0)
    batch = rows_of([37, 0, 5, 0], [1, 19, 2, 1], page)
    inputs = operands(batch, heads, kv_heads, head_dim)
    pool = pool_of(batch, page, (2, kv_heads, head_dim), torch.float32)
    named = {"window": None, "softcap": None, "sinks": torch.randn(heads), "group": "g", "scale": 0.3, **attributes}
    want_pool, got_pool = pool.double(), pool.clone()
    double = named | {"sinks": named["sinks"].double()}
    want = kernel("attention", "reference")(Step(batch), *(x.double() for x in inputs), kv=want_pool, **double)
    got = kernel("attention", "gpu")(Step(batch), *inputs, kv=got_pool, **named)
    close(got, want)
    torch.testing.assert_close(got_pool.double(), want_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("part", "parts"), [(64, 8), (256, 64)])
@pytest.mark.parametrize("window", [None, 300])
def test_keys_in_parts(monkeypatch: pytest.MonkeyPatch, part: int, parts: int, window: int | None) -> None:
    """Lengths around a part's, and so long a row that its parts have to be larger; also in one launch without parts."""
    monkeypatch.setattr(gpu, "PART", part)
    monkeypatch.setattr(gpu, "PARTS", parts)
    torch.manual_seed(1)
    batch = rows_of([part - 2, part - 1, part, 1200], [1, 1, 1, 1], 16)
    inputs = operands(batch, 2, 1, 16)
    pool = pool_of(batch, 16, (2, 1, 16), torch.float32)
    named = {"sinks": torch.randn(2), "window": window, "group": "g", "scale": 0.3}
    double = named | {"sinks": named["sinks"].double()}
    want = kernel("attention", "reference")(Step(batch), *(x.double() for x in inputs), kv=pool.double(), **double)
    close(kernel("attention", "gpu")(Step(batch), *inputs, kv=pool, **named), want)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float16, torch.float32),
                                    (torch.float32, torch.bfloat16), (torch.float32, torch.float16)])  # fmt: skip
def test_the_cache_may_have_a_dtype_of_its_own(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """What is cached is rounded to the cache's dtype, also this step's tokens."""
    activations, cached = dtypes
    torch.manual_seed(2)
    batch = rows_of([21, 30], [1, 18], 4)
    inputs = [x.to(activations) for x in operands(batch, 4, 2, 16)]
    if cached == torch.bfloat16:  # the interpreter rounds to it in its own way
        inputs = [x.bfloat16().float() for x in inputs]
    pool = pool_of(batch, 4, (2, 2, 16), cached)
    want_pool = pool.clone()
    named = {"window": None, "group": "g", "scale": 0.3}
    want = kernel("attention", "reference")(Step(batch), *(x.double() for x in inputs), kv=want_pool, **named)
    got = kernel("attention", "gpu")(Step(batch), *inputs, kv=pool, **named)
    close(got, want, 1e-5 if activations == torch.float32 else 2e-3)
    torch.testing.assert_close(pool, want_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "rank", "rope_dim", "dtype"),
    [(2, 20, 10, torch.float32), (40, 16, 16, torch.float32), (3, 80, 6, torch.float32), (5, 16, 4, torch.float16)],
)
def test_latents_of_any_size(
    monkeypatch: pytest.MonkeyPatch, heads: int, rank: int, rope_dim: int, dtype: torch.dtype
) -> None:
    """More heads than a program has, a rank of several blocks, and rows whose parts have to be larger than least."""
    monkeypatch.setattr(mla_gpu, "PART", 32)
    torch.manual_seed(3)
    batch = rows_of([31, 0, 150, 3], [1, 35, 1, 2], 8)
    shapes = [(heads, 12), (heads, rope_dim), (rank,), (1, rope_dim)]
    inputs = [torch.randn(batch.num_tokens, *shape).to(dtype) for shape in shapes]
    up = (torch.randn(heads * (12 + 7), rank) * rank**-0.5).to(dtype)
    pool = pool_of(batch, 8, (rank + rope_dim,), dtype)
    want_pool, named = pool.double(), {"group": "g", "scale": 0.3}
    want = kernel("mla", "reference")(Step(batch), *(x.double() for x in inputs), up=up.double(), kv=want_pool, **named)
    got = kernel("mla", "gpu")(Step(batch), *inputs, up=up, kv=pool, **named)
    close(got, want, 1e-5 if dtype == torch.float32 else 5e-3)
    torch.testing.assert_close(pool.double(), want_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize(("lengths", "chunk"), [([23, 1, 9], 9), ([7, 2], 1)])
def test_gpu_reads_no_page_that_no_query_sees(name: str, lengths: list[int], chunk: int) -> None:
    inner: Callable[..., None] = test_ops.test_pages_that_no_query_sees_are_not_held.hypothesis.inner_test
    inner(name, "gpu", lengths, chunk, 3)


def alone(batch: StepBatch, row: int) -> tuple[StepBatch, slice]:
    """A step of one of its rows, and that row's tokens."""
    tokens = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
    length = tokens.stop - tokens.start
    return (
        replace(
            batch,
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            cu_seqlens=np.array([0, length], np.int32),
            context_lens=batch.context_lens[[row]],
            state_src=batch.state_src[[row]],
            state_dst=batch.state_dst[[row]],
            logits_indices=np.arange(length, dtype=np.int32),
            block_tables={"g": batch.block_tables["g"][[row], : -(-(batch.positions[tokens.stop - 1] + 1) // 4)]},
        ),
        tokens,
    )


def each_row_alike(a: NDArray[Any], b: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
    """The product of two matrices, a row of which is the same wherever it stands: so it is on a GPU, not in BLAS."""
    products: NDArray[Any] = (a[:, :, None] * b[None]).sum(1, dtype=dtype)
    return products


@pytest.mark.parametrize("name", PAGED)
def test_a_row_is_the_same_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """To the bit, beside longer rows, rows of one token and two padding rows, whose page holds NaN."""
    monkeypatch.setattr(np, "matmul", each_row_alike)
    op, inputs, weight_shapes, caches, attributes = STATEFUL[name]
    torch.manual_seed(5)
    batch = rows_of([19, 3, 0, 70], [3, 1, 40, 1], 4)
    for array in (batch.context_lens, batch.block_tables["g"]):
        array[[1, 3]] = 0  # padding rows
    batch.positions[batch.cu_seqlens[[1, 3]]] = 0
    values = [torch.randn(batch.num_tokens, *shape) for shape in inputs.values()]
    weights = {key: torch.randn(shape) for key, shape in weight_shapes.items()}
    pool = pool_of(batch, 4, caches["kv"], torch.float32)
    pool[0] = torch.nan
    together = kernel(op, "gpu")(Step(batch), *values, kv=pool.clone(), **weights, **attributes)
    for row in (0, 2):
        step, tokens = alone(batch, row)
        out = kernel(op, "gpu")(Step(step), *(x[tokens] for x in values), kv=pool.clone(), **weights, **attributes)
        torch.testing.assert_close(out, together[tokens], rtol=0, atol=0)
        assert out.isfinite().all()


def test_too_wide_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention \(attention\): head_dim 257 is not in 1\.\.256"):
        plan(attention(2, 1, 257))
    with pytest.raises(ValueError, match=r"mla \(mla\): rank 513 is not in 1\.\.512"):
        plan(mla(2, 16, 16, 513, 16))
    with pytest.raises(ValueError, match=r"mla \(mla\): rope_dim 129 is not in 1\.\.128"):
        plan(mla(2, 16, 129, 512, 16))
