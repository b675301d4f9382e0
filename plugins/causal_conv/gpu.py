"""Tiles of tokens by channels; rows of one token apart. Inputs before a row's tokens come from its state."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.device import dot, silu, tile
from hybridtrt.plugins.gpu.plan import Launch, Plan, cdiv, power_of_2, tiles
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.spec import require

WIDTHS = range(2, 9)


@triton.jit
def _earlier(x, state, t, start, slot, channel, valid, C: tl.constexpr, W: tl.constexpr):
    """x at tokens t, some of which lie before the row's first token `start` and so in its state."""
    now = tl.load(x + t.to(tl.int64) * C + channel, mask=valid & (t >= start), other=0.0)
    past = state + (slot * C + channel) * (W - 1) + (t - start + W - 1)
    return now.to(tl.float32) + tl.load(past, mask=valid & (t < start), other=0.0).to(tl.float32)


@triton.jit
def causal_conv_single(
    x, weight, bias, state, cu_seqlens, state_src, state_dst, out,
    C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One token and BC channels of a row of one token, and the state after it."""
    row = tl.program_id(0)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    valid = channel < C
    tap = tl.arange(0, BW)
    source = tl.load(state_src + row).to(tl.int64)
    target = tl.load(state_dst + row).to(tl.int64)
    now = tl.load(x + token.to(tl.int64) * C + channel, mask=valid, other=0.0).to(tl.float32)
    held = valid[:, None] & (tap < W - 1)[None, :]
    at = channel[:, None] * (W - 1) + tap[None, :]
    past = tl.load(state + source * C * (W - 1) + at, mask=held, other=0.0).to(tl.float32)
    taps = tl.load(weight + channel[:, None] * W + tap[None, :], mask=held, other=0.0).to(tl.float32)
    y = tl.sum(past * taps, axis=1)
    y += now * tl.load(weight + channel * W + W - 1, mask=valid, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    tl.store(out + token.to(tl.int64) * C + channel, y, mask=valid)
    shifted = valid[:, None] & (tap < W - 2)[None, :]
    kept = tl.load(state + source * C * (W - 1) + at + 1, mask=shifted, other=0.0).to(tl.float32)
    kept = tl.where((tap == W - 2)[None, :], now[:, None], kept)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target * C * (W - 1) + at, kept, mask=held)


@triton.jit
def causal_conv_tile(
    x, weight, bias, state, cu_seqlens, state_src, B, out,
    C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT tokens and BC channels of a longer row."""
    row, start, first, end = tile(cu_seqlens, B, tl.program_id(0), BT)
    if (first >= end) | (end - start == 1):
        return
    slot = tl.load(state_src + row).to(tl.int64)
    token = first + tl.arange(0, BT)[:, None]
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    valid = (token < end) & (channel < C)
    y = tl.zeros((BT, BC), tl.float32)
    for w in tl.static_range(W):
        taps = tl.load(weight + channel * W + w, mask=channel < C, other=0.0).to(tl.float32)
        y += taps * _earlier(x, state, token - (W - 1) + w, start, slot, channel, valid, C, W)
    if bias is not None:
        y += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    tl.store(out + token.to(tl.int64) * C + channel, y, mask=valid)


@triton.jit
def causal_conv_grouped_tile(
    x, weight, bias, state, cu_seqlens, state_src, B, out,
    C: tl.constexpr, G: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    BT: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BT tokens of a row and BO output channels of a group of G: a product for each tap."""
    row, start, first, end = tile(cu_seqlens, B, tl.program_id(0), BT)
    if first >= end:
        return
    slot = tl.load(state_src + row).to(tl.int64)
    group = tl.program_id(1)
    token = first + tl.arange(0, BT)[:, None]
    within = (tl.program_id(2) * BO + tl.arange(0, BO))[None, :]
    channel = group * G + within
    y = tl.zeros((BT, BO), tl.float32)
    for i in range(0, G, BI):
        inner = i + tl.arange(0, BI)
        valid = (token < end) & (inner < G)[None, :]
        for w in tl.static_range(W):
            value = _earlier(x, state, token - (W - 1) + w, start, slot, group * G + inner[None, :], valid, C, W)
            at = (channel * G + inner[:, None]) * W + w
            taps = tl.load(weight + at, mask=(inner < G)[:, None] & (within < G), other=0.0)
            y = dot(value, taps, y, DOT)
    if bias is not None:
        y += tl.load(bias + channel, mask=within < G, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    tl.store(out + token.to(tl.int64) * C + channel, y, mask=(token < end) & (within < G))


@triton.jit
def causal_conv_state(
    x, state, cu_seqlens, state_src, state_dst,
    C: tl.constexpr, W: tl.constexpr, LEAST: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The state after a row of at least LEAST tokens: the last W - 1 inputs, of it and of the state before."""
    row = tl.program_id(0)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start < LEAST:
        return
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[:, None]
    tap = tl.arange(0, BW)[None, :]
    valid = (channel < C) & (tap < W - 1)
    source = tl.load(state_src + row).to(tl.int64)
    target = tl.load(state_dst + row).to(tl.int64)
    kept = _earlier(x, state, end - (W - 1) + tap, start, source, channel, valid, C, W)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + (target * C + channel) * (W - 1) + tap, kept, mask=valid)


def causal_conv(call: Call) -> Plan:
    """Widths 2 to 8, depthwise or in groups of any number of channels."""
    weight = call.operand("weight").shape
    channels, width = int(weight[0]), int(weight[-1])
    require(width in WIDTHS, f"width {width} is not in {WIDTHS[0]}..{WIDTHS[-1]}")
    sizes = {"C": channels, "W": width}
    silu = {"SILU": call.attributes.get("activation") == "silu"}
    depthwise = len(weight) == 2
    bc, bt = min(128, power_of_2(channels)), 16
    state_block = {"BC": bc, "BW": power_of_2(width - 1)}
    keep = Launch(
        causal_conv_state,
        lambda s: (s.B, cdiv(channels, bc)),
        ("state",),
        sizes | state_block | {"LEAST": 2 if depthwise else 1},
        rows="longer" if depthwise else "all",
    )
    if depthwise:
        single = Launch(
            causal_conv_single,
            lambda s: (s.B, cdiv(channels, bc)),
            ("out", "state"),
            sizes | silu | state_block,
            rows="single",
        )
        longer = Launch(
            causal_conv_tile,
            lambda s: (tiles(s, bt), cdiv(channels, bc)),
            ("out",),
            sizes | silu | {"BT": bt, "BC": bc},
            rows="longer",
        )
        return Plan((longer, keep, single))
    group = int(weight[1])
    block = max(16, min(32, power_of_2(group)))
    grouped = Launch(
        causal_conv_grouped_tile,
        lambda s: (tiles(s, bt), channels // group, cdiv(group, block)),
        ("out",),
        sizes | silu | {"G": group, "BT": bt, "BO": block, "BI": block, "DOT": triton_dtype(call.operand("x").dtype)},
        num_stages=1,
    )
    return Plan((grouped, keep))
