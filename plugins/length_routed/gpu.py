"""Attention below a position by the launches of `attention`, and linear attention from it on: numerators and
normalisers as one recurrence over head_dim + 1 value channels, the last of which is one, into scratch; then a division
for the tokens that are routed there.

Programs are rows, KV heads and blocks of value channels. Rows of one token apart; longer ones in chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.attention.gpu import attention_launches
from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, block, cdiv, power_of_2
from hybridtrt.plugins.gpu.recurrence import read_chunk, write_chunk
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.spec import require

HEAD_DIMS = range(1, 257)


@triton.jit
def _features(x, valid):
    """elu(x) + 1 in float32, 0 where not valid."""
    x = x.to(tl.float32)
    return tl.where(valid, tl.where(x > 0.0, x + 1.0, tl.exp(tl.minimum(x, 0.0))), 0.0)


@triton.jit
def _with_ones(v, at, value, valid, D: tl.constexpr):
    """Value channels of the heads `at` of v; channel D is one."""
    x = tl.load(v + at * D + value, mask=valid & (value < D), other=0.0).to(tl.float32)
    return tl.where(valid & (value == D), 1.0, x)


@triton.jit
def linear_attention_from_single(
    q, k, v, state, cu_seqlens, state_src, state_dst, sums,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token, one KV head with its GROUP query heads and BV value channels of a row of one token."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    channel = tl.arange(0, BD)
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (channel < D)[:, None] & (value <= D)[None, :]
    at = channel[:, None] * (D + 1) + value[None, :]
    source = state + (tl.load(state_src + row).to(tl.int64) * H + head) * (D * (D + 1))
    target = state + (tl.load(state_dst + row).to(tl.int64) * H + head) * (D * (D + 1))
    s = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    at_head = token.to(tl.int64) * H + head
    key = _features(tl.load(k + at_head * D + channel, mask=channel < D, other=0.0), channel < D)
    s += key[:, None] * _with_ones(v, at_head, value, value <= D, D)[None, :]
    for member in range(GROUP):
        at_query = at_head * GROUP + member
        query = _features(tl.load(q + at_query * D + channel, mask=channel < D, other=0.0), channel < D)
        y = tl.sum(query[:, None] * s, axis=0)
        tl.store(sums + at_query * (D + 1) + value, y, mask=value <= D)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target + at, s, mask=inside)


@triton.jit
def linear_attention_from_walk(
    q, k, v, state, cu_seqlens, state_src, state_dst, sums,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A longer row, one KV head with its GROUP query heads and BV value channels, chunk by chunk."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start == 1:
        return
    channel = tl.arange(0, BD)
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (channel < D)[:, None] & (value <= D)[None, :]
    at = channel[:, None] * (D + 1) + value[None, :]
    source = state + (tl.load(state_src + row).to(tl.int64) * H + head) * (D * (D + 1))
    target = state + (tl.load(state_dst + row).to(tl.int64) * H + head) * (D * (D + 1))
    s = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    for first in range(start, end, BT):
        token = first + tl.arange(0, BT)
        keys = (token < end)[:, None] & (channel < D)[None, :]
        values = (token < end)[:, None] & (value <= D)[None, :]
        at_head = (token.to(tl.int64) * H + head)[:, None]
        key = _features(tl.load(k + at_head * D + channel[None, :], mask=keys, other=0.0), keys)
        x = _with_ones(v, at_head, value[None, :], values, D)
        for member in range(GROUP):
            at_query = at_head * GROUP + member
            query = _features(tl.load(q + at_query * D + channel[None, :], mask=keys, other=0.0), keys)
            y = read_chunk(query, key, x, s, BT, DOT)
            tl.store(sums + at_query * (D + 1) + value[None, :], y, mask=values)
        s = write_chunk(key, x, s, DOT)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target + at, s, mask=inside)


@triton.jit
def linear_attention_from_divide(
    y, positions, sums, T, out,
    H: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BT heads of tokens: what was summed over its normaliser from position LIMIT on, y before."""
    at = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.arange(0, BD)[None, :]
    there = at < T.to(tl.int64) * H
    valid = there[:, None] & (channel < D)
    routed = tl.load(positions + at // H, mask=there, other=0) >= LIMIT
    kept = tl.load(y + at[:, None] * D + channel, mask=valid, other=0.0).to(tl.float32)
    total = tl.load(sums + at[:, None] * (D + 1) + channel, mask=valid, other=0.0)
    normaliser = tl.load(sums + at * (D + 1) + D, mask=there, other=1.0)
    tl.store(out + at[:, None] * D + channel, tl.where(routed[:, None], total / normaliser[:, None], kept), mask=valid)


def linear_attention_from(call: Call) -> Plan:
    """Head dims 1 to 256 (in float32 to 128), any number of KV heads and of query heads for each."""
    heads, D = (int(dim) for dim in call.operand("q").shape[1:])
    H = int(call.operand("k").shape[1])
    require(D in HEAD_DIMS, f"head dim {D} is not in {HEAD_DIMS[0]}..{HEAD_DIMS[-1]}")
    dtype = call.operand("q").dtype
    exact = dtype == "float32"  # products need three times the registers and memory
    require(not exact or D <= 128, f"head dim {D} is above 128, the most in float32")
    constants = {"H": H, "GROUP": heads // H, "D": D}
    bv, bt = block(D + 1, 32), max(1, 1024 // power_of_2(D))
    narrow = 16 if exact or D > 128 else bv
    single = Launch(
        linear_attention_from_single,
        lambda s: (s.B, H, cdiv(D + 1, bv)),
        ("state", "sums"),
        constants | {"BD": power_of_2(D), "BV": bv},
        rows="single",
    )
    walk = Launch(
        linear_attention_from_walk,
        lambda s: (s.B, H, cdiv(D + 1, narrow)),
        ("state", "sums"),
        constants
        | {"BT": 16 if exact or D > 128 else 32, "BD": block(D, 256), "BV": narrow, "DOT": triton_dtype(dtype)},
        rows="longer",
        num_stages=1,
    )
    divide = Launch(
        linear_attention_from_divide,
        lambda s: (cdiv(s.T * heads, bt),),
        ("out",),
        {"H": heads, "D": D, "LIMIT": int(call.attributes["limit"]), "BT": bt, "BD": power_of_2(D)},
    )
    return Plan((walk, single, divide), {"sums": Scratch(lambda s: (s.T, heads, D + 1))})


def attention_below(call: Call) -> Plan:
    """Head sizes up to 256, any numbers of heads, pages of any size."""
    return attention_launches(call, int(call.attributes["limit"]))
