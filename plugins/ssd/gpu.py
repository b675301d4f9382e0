"""Rows of one token: a program for a block of channels of a head. Longer rows: the same, walking chunks of tokens.

The chunked form is that of arXiv 2405.21060, section 6. A walking program keeps its part of the state in float32 from
the row's first token to its last, so the state is read once and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.device import decay_sums, dot, softplus, tile
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, cdiv, power_of_2, tiles
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.spec import require

HEAD_DIMS = range(1, 257)
STATE_SIZES = range(1, 257)


@triton.jit
def _time_step(dt, dt_bias, token, head, valid, H: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
    """softplus(dt + dt_bias) within its limits at tokens of a head; 0 where not valid."""
    raw = tl.load(dt + token * H + head, mask=valid, other=0.0).to(tl.float32)
    step = tl.maximum(softplus(raw + tl.load(dt_bias + head).to(tl.float32)), DT_MIN)
    if DT_MAX is not None:
        step = tl.minimum(step, DT_MAX)
    return tl.where(valid, step, 0.0)


@triton.jit
def ssd_single(
    x, dt, b, c, A_log, D, dt_bias, state, cu_seqlens, state_src, state_dst, out,
    H: tl.constexpr, G: tl.constexpr, HEAD: tl.constexpr, N: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One token of a row of one token, a head, BP of its channels."""
    row = tl.program_id(0)
    token = tl.load(cu_seqlens + row).to(tl.int64)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    head = tl.program_id(1)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    source = tl.load(state_src + row).to(tl.int64) * H + head
    target = tl.load(state_dst + row).to(tl.int64) * H + head
    at = p[:, None] * N + n[None, :]
    valid = (p < HEAD)[:, None] & (n < N)[None, :]
    s = tl.load(state + source * HEAD * N + at, mask=valid, other=0.0).to(tl.float32)
    group = token * G + head // (H // G)
    bb = tl.load(b + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    cc = tl.load(c + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    xx = tl.load(x + (token * H + head) * HEAD + p, mask=p < HEAD, other=0.0).to(tl.float32)
    step = _time_step(dt, dt_bias, token, head, True, H, DT_MIN, DT_MAX)
    decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * step)
    s = s * decay + (step * xx)[:, None] * bb[None, :]
    y = tl.sum(s * cc[None, :], axis=1) + tl.load(D + head).to(tl.float32) * xx
    tl.store(out + (token * H + head) * HEAD + p, y, mask=p < HEAD)
    tl.store(state + target * HEAD * N + at, s, mask=valid)


@triton.jit
def ssd_scores(
    b, c, cu_seqlens, B, scores,
    G: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """C B^T of a tile of a longer row, one group: [BT, BT]."""
    number = tl.program_id(0)
    group = tl.program_id(1)
    _, start, first, end = tile(cu_seqlens, B, number, BT)
    if (first >= end) | (end - start == 1):
        return
    i = tl.arange(0, BT)
    there = (first + i < end)[:, None]
    at = (tl.cast(first, tl.int64) * G + group) * N + i[:, None] * (G * N)
    product = tl.zeros((BT, BT), tl.float32)
    for k in range(0, N, BK):
        n = k + tl.arange(0, BK)[None, :]
        bb = tl.load(b + at + n, mask=there & (n < N), other=0.0)
        cc = tl.load(c + at + n, mask=there & (n < N), other=0.0)
        product = dot(cc, tl.trans(bb), product, DTYPE)
    place = (tl.cast(number, tl.int64) * G + group) * BT * BT
    tl.store(scores + place + i[:, None] * BT + i[None, :], product)


@triton.jit
def ssd_chunks(
    x, dt, b, c, A_log, D, dt_bias, state, cu_seqlens, state_src, state_dst, scores, out,
    H: tl.constexpr, G: tl.constexpr, HEAD: tl.constexpr, N: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A longer row, a head, BP of its channels. The state is held transposed: [BN, BP]."""
    row = tl.program_id(2)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start == 1:
        return
    head = tl.program_id(1)
    group = head // (H // G)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    i = tl.arange(0, BT)
    source = tl.load(state_src + row).to(tl.int64) * H + head
    target = tl.load(state_dst + row).to(tl.int64) * H + head
    at = p[None, :] * N + n[:, None]
    valid = (p < HEAD)[None, :] & (n < N)[:, None]
    s = tl.load(state + source * HEAD * N + at, mask=valid, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    skip = tl.load(D + head).to(tl.float32)
    product = scores + (tl.cast(start // BT + row, tl.int64) * G + group) * BT * BT
    for first in range(start, end, BT):
        token = tl.cast(first, tl.int64)
        there = first + i < end
        inputs = there[:, None] & (n < N)[None, :]
        bb = tl.load(b + (token * G + group) * N + (i[:, None] * (G * N) + n[None, :]), mask=inputs, other=0.0)
        cc = tl.load(c + (token * G + group) * N + (i[:, None] * (G * N) + n[None, :]), mask=inputs, other=0.0)
        place = (token * H + head) * HEAD + (i[:, None] * (H * HEAD) + p[None, :])
        channels = there[:, None] & (p < HEAD)[None, :]
        xx = tl.load(x + place, mask=channels, other=0.0)
        step = _time_step(dt + token * H, dt_bias, i, head, there, H, DT_MIN, DT_MAX)
        high, low, last_high, last_low = decay_sums(rate * step)
        exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        causal = i[:, None] >= i[None, :]
        within = tl.load(product + i[:, None] * BT + i[None, :], mask=causal, other=0.0)
        within = within * tl.exp(tl.where(causal, exponent, -float("inf"))) * step[None, :]
        y = dot(cc, s, None, DTYPE) * tl.exp(high + low)[:, None]
        y = dot(within, xx, y, DTYPE)
        tl.store(out + place, y + skip * xx.to(tl.float32), mask=channels)
        scaled = xx.to(tl.float32) * (step * tl.exp((last_high - high) + (last_low - low)))[:, None]
        s = dot(tl.trans(bb), scaled, s * tl.exp(last_high + last_low), DTYPE)
        product += G * BT * BT
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target * HEAD * N + at, s, mask=valid)


def ssd(call: Call) -> Plan:
    """Head and state sizes up to 256, any number of heads and groups."""
    heads, head_dim = (int(size) for size in call.operand("x").shape[1:])
    groups, size = (int(size) for size in call.operand("b").shape[1:])
    require(head_dim in HEAD_DIMS, f"head size {head_dim} is not in {HEAD_DIMS[0]}..{HEAD_DIMS[-1]}")
    require(size in STATE_SIZES, f"state size {size} is not in {STATE_SIZES[0]}..{STATE_SIZES[-1]}")
    dtype = call.operand("x").dtype
    wide = dtype == "float32"  # products need three times the registers
    chunk = 16 if wide else 64 if size <= 128 else 32
    block = 16 if wide or head_dim <= 16 else 32
    sizes = {"G": groups, "N": size}
    constants = sizes | {
        "H": heads,
        "HEAD": head_dim,
        "DT_MIN": call.attributes.get("dt_min", 0.0),
        "DT_MAX": call.attributes.get("dt_max"),
        "BP": block,
        "BN": max(16, power_of_2(size)),
    }
    products = {"BT": chunk, "DTYPE": triton_dtype(dtype)}
    blocks = cdiv(head_dim, block)
    scores = Launch(
        ssd_scores,
        lambda s: (tiles(s, chunk), groups),
        ("scores",),
        sizes | products | {"BK": max(16, min(64, power_of_2(size)))},
        rows="longer",
    )
    longer = Launch(
        ssd_chunks,
        lambda s: (blocks, heads, s.B),
        ("out", "state"),
        constants | products,
        rows="longer",
        num_warps=8,
        num_stages=1 if wide else 2,
    )
    single = Launch(ssd_single, lambda s: (s.B, heads, blocks), ("out", "state"), constants, rows="single")
    scratch = {"scores": Scratch(lambda s: (tiles(s, chunk), groups, chunk, chunk))}
    return Plan((scores, longer, single), scratch)
