"""The C++ attention kernels against their definitions in float64: instruction sets, threads, pools of any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import cut, make_batch, place

from hybridtrt.plugins.native.library import supported_isas
from hybridtrt.plugins.native.one_op import run_one
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel, op_spec

Tensors = dict[str, torch.Tensor]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Case:
    """Sequences of random tokens for one operator, and pools whose pages are NaN until something is stored."""

    def __init__(self, op: str, lengths: list[int], inputs: dict[str, tuple[int, ...]], token: tuple[int, ...],
                 weights: dict[str, tuple[int, ...]], page: int, seed: int, **attributes: Any) -> None:  # fmt: skip
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.op, self.lengths, self.attributes, self.page, self.token = op, lengths, attributes, page, token
        self.data = [{name: torch.randn(n, *shape) for name, shape in inputs.items()} for n in lengths]
        self.weights = {name: torch.randn(shape) * 0.5 for name, shape in weights.items()}
        self.placement = place(lengths, page, self.rng)

    def pool(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((self.placement.num_pages, self.page, *self.token), torch.nan, dtype=dtype)

    def step(self, rows: list[tuple[int, int, int]]) -> tuple[Step, list[torch.Tensor]]:
        tokens = [[0] * n for n in self.lengths]
        inputs = [torch.cat([self.data[s][name][a:b] for s, a, b in rows]) for name in self.data[0]]
        return Step(make_batch(rows, tokens, self.placement, ["g"])), inputs

    def expected(self) -> list[torch.Tensor]:
        """Each sequence in one piece, by the definition in float64."""
        step, inputs = self.step([(s, 0, n) for s, n in enumerate(self.lengths)])
        weights = {name: weight.double() for name, weight in self.weights.items()}
        function = kernel(self.op, "reference")
        out = function(step, *(x.double() for x in inputs), **weights, kv=self.pool(torch.float64), group="g",
                       **self.attributes)  # fmt: skip
        return list(out.split(self.lengths))

    def run(self, rows: list[tuple[int, int, int]], pool: torch.Tensor, threads: int = 2) -> list[torch.Tensor]:
        """One step of the C++ kernel; the result of each row."""
        step, inputs = self.step(rows)
        named = {**self.weights, "kv": pool, "group": "g", **self.attributes}
        out = run_one(op_spec(self.op), step, *inputs, threads=threads, **named)
        return list(out.split([b - a for _, a, b in rows]))

    def check(self, chunk: int, threads: int, dtype: torch.dtype = torch.float32) -> None:
        """Random cuts of the sequences into steps come to the definition."""
        pool = self.pool(dtype)
        got: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        for rows in cut(self.lengths, chunk, self.rng):
            for (sequence, _, _), out in zip(rows, self.run(rows, pool, threads), strict=True):
                got[sequence].append(out)
        for want, pieces in zip(self.expected(), got, strict=True):
            limit = ROUNDING[dtype] * float(want.abs().max())
            torch.testing.assert_close(torch.cat(pieces).double(), want, rtol=0, atol=limit)


def attention_case(lengths: list[int], kv_heads: int, group: int, dim: int, page: int, seed: int, sinks: bool = False,
                   op: str = "attention", **attributes: Any) -> Case:  # fmt: skip
    heads = kv_heads * group
    inputs = {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)}
    weights = {"sinks": (heads,)} if sinks else {}
    return Case(op, lengths, inputs, (2, kv_heads, dim), weights, page, seed, scale=dim**-0.5, **attributes)


def mla_case(lengths: list[int], heads: int, nope: int, rope: int, rank: int, v_dim: int, page: int, seed: int) -> Case:
    inputs = {"q_nope": (heads, nope), "q_rope": (heads, rope), "latent": (rank,), "k_rope": (1, rope)}
    weights = {"up": (heads * (nope + v_dim), rank)}
    return Case("mla", lengths, inputs, (rank + rope,), weights, page, seed, scale=(nope + rope) ** -0.5)


@pytest.fixture(params=supported_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HYBRIDTRT_ISA", request.param)
    return str(request.param)


CUTS = {
    "lengths": st.lists(st.sampled_from([1, 2, 17, 63, 97, 130, 261]), min_size=1, max_size=3),
    "chunk": st.sampled_from([1, 5, 40, 300]),
    "threads": st.sampled_from([1, 2]),
    "page": st.sampled_from([3, 16]),
    "seed": st.integers(0, 2**32 - 1),
}
FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(
    **CUTS,
    heads=st.sampled_from([(1, 1), (2, 3), (1, 7), (3, 1)]),
    dim=st.sampled_from([1, 5, 8, 24, 33]),
    window=st.sampled_from([None, 1, 20, 140]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
)
def test_attention_is_its_definition(
    isa: str, lengths: list[int], chunk: int, threads: int, page: int, seed: int, heads: tuple[int, int], dim: int,
    window: int | None, softcap: float | None, sinks: bool,
) -> None:  # fmt: skip
    case = attention_case(lengths, *heads, dim, page, seed, sinks, window=window, softcap=softcap)
    case.check(chunk if sum(lengths) < 200 else max(chunk, 40), threads)


@FEW
@given(**CUTS, limit=st.sampled_from([1, 30, 200]), heads=st.sampled_from([(1, 2), (2, 3)]))
def test_attention_below_a_limit_is_its_definition(
    isa: str, lengths: list[int], chunk: int, threads: int, page: int, seed: int, limit: int, heads: tuple[int, int]
) -> None:
    case = attention_case(lengths, *heads, 12, page, seed, op="attention_below", limit=limit)
    case.check(chunk if sum(lengths) < 200 else max(chunk, 40), threads)


@FEW
@given(
    **CUTS, heads=st.sampled_from([1, 3, 40]), sizes=st.sampled_from([(6, 4, 8, 5), (17, 3, 37, 9), (8, 16, 24, 40)])
)
def test_latent_attention_is_its_definition(
    isa: str, lengths: list[int], chunk: int, threads: int, page: int, seed: int, heads: int,
    sizes: tuple[int, int, int, int],
) -> None:  # fmt: skip
    case = mla_case(lengths, heads, *sizes, page, seed)
    case.check(chunk if sum(lengths) < 200 else max(chunk, 40), threads)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("chunk", [1, 70])
def test_pools_of_any_dtype(isa: str, dtype: torch.dtype, chunk: int) -> None:
    attention_case([1, 71, 33], 2, 2, 20, 5, 1).check(chunk, 2, dtype)
    mla_case([1, 71, 33], 3, 6, 4, 9, 5, 5, 1).check(chunk, 2, dtype)


@pytest.mark.parametrize("lengths", [[5, 300, 1, 790]])
def test_a_decoded_token_is_the_same_alone_and_in_any_batch(isa: str, lengths: list[int]) -> None:
    """Bitwise, with 1 thread and 2, beside other decoded tokens and beside a prompt."""
    cases = [
        attention_case(lengths, 2, 3, 24, 4, 2),
        attention_case(lengths, 1, 4, 24, 4, 3, sinks=True, window=290),
        attention_case(lengths, 1, 2, 24, 4, 3, op="attention_below", limit=700),
        mla_case(lengths, 3, 6, 4, 9, 5, 4, 4),
    ]
    for case in cases:
        pool = case.pool(torch.float32)
        case.run([(s, 0, n - 1) for s, n in enumerate(lengths) if n > 1], pool)
        alone = [case.run([(s, n - 1, n)], pool.clone(), 1)[0] for s, n in enumerate(lengths)]
        together = case.run([(s, n - 1, n) for s, n in enumerate(lengths)], pool.clone(), 2)
        mixed = case.run([(3, 700, 790), (1, 299, 300), (0, 4, 5)], pool.clone(), 2)
        for want, got in [*zip(alone, together, strict=True), (alone[1], mixed[1]), (alone[0], mixed[2])]:
            assert torch.equal(want, got)
