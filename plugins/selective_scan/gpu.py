"""Programs for some channels of a row, whose states they hold: one token, or a walk over chunks of tokens.

Inside a chunk the states after each token are an inclusive scan. The next chunk is read before the present one is
computed. Channels of a program share B and C: they are of one group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.device import softplus
from hybridtrt.plugins.gpu.plan import Launch, Plan, cdiv, power_of_2
from hybridtrt.plugins.spec import require

STATE_SIZES = range(1, 129)
LOG2_E = 1.4426950408889634


@triton.jit
def _rate(A_log, channel, n, mask, N: tl.constexpr, LOG2_E: tl.constexpr):
    """A log2(e), so that exp(dt A) is a power of two; not infinite, since a step may be 0."""
    a = tl.exp(tl.load(A_log + channel * N + n, mask=mask, other=0.0).to(tl.float32))
    return tl.maximum(-LOG2_E * a, -1e38)


@triton.jit
def selective_scan_single(
    x, dt, b, c, A_log, D, dt_bias, state, cu_seqlens, state_src, state_dst, out,
    C: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LOG2_E: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One token of a row of one token, BC channels of a group."""
    row = tl.program_id(2)
    token = tl.load(cu_seqlens + row).to(tl.int64)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    group = tl.program_id(1)
    within = tl.program_id(0) * BC + tl.arange(0, BC)
    channel = group * (C // G) + within
    valid = within < C // G
    n = tl.arange(0, BN)
    held = valid[:, None] & (n < N)[None, :]
    at = channel[:, None] * N + n[None, :]
    source = tl.load(state_src + row).to(tl.int64)
    target = tl.load(state_dst + row).to(tl.int64)
    h = tl.load(state + source * C * N + at, mask=held, other=0.0).to(tl.float32)
    rate = _rate(A_log, channel[:, None], n[None, :], held, N, LOG2_E)
    bb = tl.load(b + (token * G + group) * N + n, mask=n < N, other=0.0).to(tl.float32)
    cc = tl.load(c + (token * G + group) * N + n, mask=n < N, other=0.0).to(tl.float32)
    xx = tl.load(x + token * C + channel, mask=valid, other=0.0).to(tl.float32)
    raw = tl.load(dt + token * C + channel, mask=valid, other=0.0).to(tl.float32)
    step = softplus(raw + tl.load(dt_bias + channel, mask=valid, other=0.0).to(tl.float32))
    h = tl.exp2(step[:, None] * rate) * h + (step * xx)[:, None] * bb[None, :]
    y = tl.sum(h * cc[None, :], axis=1) + tl.load(D + channel, mask=valid, other=0.0).to(tl.float32) * xx
    tl.store(out + token * C + channel, y, mask=valid)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target * C * N + at, h, mask=held)


@triton.jit
def _chunk(
    x, dt, b, c, first, end, channel, valid, group, n,
    C: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """x and dt [BT, BC], B and C [BT, BN] of a row's tokens from `first` on; 0 beyond its end."""
    i = tl.arange(0, BT)
    token = tl.cast(first, tl.int64)
    channels = (first + i < end)[:, None] & valid[None, :]
    at = token * C + (i[:, None] * C + channel[None, :])
    xx = tl.load(x + at, mask=channels, other=0.0)
    raw = tl.load(dt + at, mask=channels, other=0.0)
    numbers = (first + i < end)[:, None] & (n < N)[None, :]
    at = (token * G + group) * N + (i[:, None] * (G * N) + n[None, :])
    return xx, raw, tl.load(b + at, mask=numbers, other=0.0), tl.load(c + at, mask=numbers, other=0.0)


@triton.jit
def _then(decay, value, next_decay, next_value):
    """h -> decay h + value, and then the same with the next."""
    return decay * next_decay, next_decay * value + next_value


@triton.jit
def selective_scan_chunks(
    x, dt, b, c, A_log, D, dt_bias, state, cu_seqlens, state_src, state_dst, out,
    C: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LOG2_E: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A longer row, BC channels of a group. The states are held transposed: [BN, BC]."""
    row = tl.program_id(2)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start == 1:
        return
    group = tl.program_id(1)
    within = tl.program_id(0) * BC + tl.arange(0, BC)
    channel = group * (C // G) + within
    valid = within < C // G
    n = tl.arange(0, BN)
    i = tl.arange(0, BT)
    held = (n < N)[:, None] & valid[None, :]
    at = channel[None, :] * N + n[:, None]
    source = tl.load(state_src + row).to(tl.int64)
    target = tl.load(state_dst + row).to(tl.int64)
    h = tl.load(state + source * C * N + at, mask=held, other=0.0).to(tl.float32)
    rate = _rate(A_log, channel[None, :], n[:, None], held, N, LOG2_E)
    bias = tl.load(dt_bias + channel, mask=valid, other=0.0).to(tl.float32)
    skip = tl.load(D + channel, mask=valid, other=0.0).to(tl.float32)
    xx, raw, bb, cc = _chunk(x, dt, b, c, start, end, channel, valid, group, n, C, G, N, BT)
    for first in range(start, end, BT):
        next_x, next_raw, next_b, next_c = _chunk(x, dt, b, c, first + BT, end, channel, valid, group, n, C, G, N, BT)
        there = (first + i < end)[:, None]
        step = tl.where(there, softplus(raw.to(tl.float32) + bias[None, :]), 0.0)
        decay = tl.exp2(step[:, None, :] * rate[None, :, :])
        value = (step * xx.to(tl.float32))[:, None, :] * bb.to(tl.float32)[:, :, None]
        value += tl.where((i == 0)[:, None, None], decay * h[None, :, :], 0.0)
        _, value = tl.associative_scan((decay, value), 0, _then)
        y = tl.sum(value * cc.to(tl.float32)[:, :, None], axis=1) + skip[None, :] * xx.to(tl.float32)
        place = tl.cast(first, tl.int64) * C + (i[:, None] * C + channel[None, :])
        tl.store(out + place, y, mask=there & valid[None, :])
        h = tl.sum(tl.where((i == BT - 1)[:, None, None], value, 0.0), axis=0)
        xx, raw, bb, cc = next_x, next_raw, next_b, next_c
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target * C * N + at, h, mask=held)


def selective_scan(call: Call) -> Plan:
    """State sizes up to 128, any number of channels and groups."""
    channels = int(call.operand("x").shape[1])
    groups, size = (int(dim) for dim in call.operand("b").shape[1:])
    require(size in STATE_SIZES, f"state size {size} is not in {STATE_SIZES[0]}..{STATE_SIZES[-1]}")
    width, each = power_of_2(size), channels // groups
    constants = {"C": channels, "G": groups, "N": size, "LOG2_E": LOG2_E, "BN": width}
    written = ("out", "state")
    most = power_of_2(each)
    one, walked = min(most, max(8, 512 // width)), min(most, max(16, 256 // width))
    single = Launch(
        selective_scan_single,
        lambda s: (cdiv(each, one), groups, s.B),
        written,
        constants | {"BC": one},
        rows="single",
    )
    longer = Launch(
        selective_scan_chunks,
        lambda s: (cdiv(each, walked), groups, s.B),
        written,
        constants | {"BC": walked, "BT": 8},
        rows="longer",
        num_warps=max(2, min(8, width // 8)),
    )
    return Plan((longer, single))
