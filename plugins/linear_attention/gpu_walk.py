"""The walk over the chunks of a longer row, with a block of the state's value channels in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import dot


@triton.jit
def _read(x, at, s, c: tl.constexpr, valid, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):
    """Channels c to c + BK of tokens of x [..., K], times those of the state."""
    channel = c + tl.arange(0, BK)
    part = tl.load(x + at[:, None] * K + channel[None, :], mask=valid[:, None] & (channel < K)[None, :], other=0.0)
    return dot(part, s, tl.zeros((part.shape[0], s.shape[1]), tl.float32), DOT)


@triton.jit
def _write(k, at, x, s, decay, c: tl.constexpr, valid, K: tl.constexpr, BK: tl.constexpr, DECAYS: tl.constexpr,
           CHANNELS: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Channels c to c + BK of the state after a chunk."""
    channel = c + tl.arange(0, BK)
    if DECAYS:
        if CHANNELS:
            s *= tl.load(decay + channel, mask=channel < K, other=0.0)[:, None]
        else:
            s *= tl.load(decay)
    part = tl.load(k + at[:, None] * K + channel[None, :], mask=valid[:, None] & (channel < K)[None, :], other=0.0)
    return dot(tl.trans(part), x, s, DOT)


@triton.jit
def linear_attention_walk(
    q, k, v, state, cu_seqlens, state_src, state_dst,
    q_decayed, k_decayed, from_start, to_end, decay, scores, w, u, out,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DELTA: tl.constexpr, DECAYS: tl.constexpr, CHANNELS: tl.constexpr,
    FEW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A longer row, one head and BV value channels. The scratch is described in gpu_chunk.py.

    The state is held in up to four parts of BK key channels. What scales a token of q or k as a whole scales a row of
    a product instead; a decay in each channel is in q_decayed and k_decayed already.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start <= FEW:
        return
    channel = tl.arange(0, BK)[:, None]
    value = (tl.program_id(2) * BV + tl.arange(0, BV))[None, :]
    inside = value < V
    source = state + (tl.load(state_src + row).to(tl.int64) * H + head) * (K * V) + channel * V + value
    target = state + (tl.load(state_dst + row).to(tl.int64) * H + head) * (K * V) + channel * V + value
    s_0 = tl.load(source, mask=inside & (channel < K), other=0.0).to(tl.float32)
    if K > BK:
        s_1 = tl.load(source + BK * V, mask=inside & (channel + BK < K), other=0.0).to(tl.float32)
    if K > 2 * BK:
        s_2 = tl.load(source + 2 * BK * V, mask=inside & (channel + 2 * BK < K), other=0.0).to(tl.float32)
    if K > 3 * BK:
        s_3 = tl.load(source + 3 * BK * V, mask=inside & (channel + 3 * BK < K), other=0.0).to(tl.float32)
    number = (start // BT + row).to(tl.int64) * H + head
    for first in range(start, end, BT):
        token = first + tl.arange(0, BT)
        valid = token < end
        at = token.to(tl.int64) * H + head
        values = valid[:, None] & inside
        if DELTA:
            x = tl.load(u + at[:, None] * V + value, mask=values, other=0.0).to(tl.float32)
            x -= _read(w, at, s_0, 0, valid, K, BK, DOT)
            if K > BK:
                x -= _read(w, at, s_1, BK, valid, K, BK, DOT)
            if K > 2 * BK:
                x -= _read(w, at, s_2, 2 * BK, valid, K, BK, DOT)
            if K > 3 * BK:
                x -= _read(w, at, s_3, 3 * BK, valid, K, BK, DOT)
        else:
            x = tl.load(v + at[:, None] * V + value, mask=values, other=0.0).to(tl.float32)
        if CHANNELS:
            query = q_decayed
            key = k_decayed
            at_key = at
            at_decay = decay + number * K
        else:
            query = q
            key = k
            at_key = token.to(tl.int64) * (H // GROUP) + head // GROUP
            at_decay = decay + number if DECAYS else None
        y = _read(query, at_key, s_0, 0, valid, K, BK, DOT)
        if K > BK:
            y += _read(query, at_key, s_1, BK, valid, K, BK, DOT)
        if K > 2 * BK:
            y += _read(query, at_key, s_2, 2 * BK, valid, K, BK, DOT)
        if K > 3 * BK:
            y += _read(query, at_key, s_3, 3 * BK, valid, K, BK, DOT)
        if not CHANNELS:
            y *= tl.load(from_start + at, mask=valid, other=0.0)[:, None]
        inner = tl.load(scores + at[:, None] * BT + tl.arange(0, BT)[None, :], mask=valid[:, None], other=0.0)
        y = dot(inner, x, y, DOT)
        tl.store(out + at[:, None] * V + value, y, mask=values)
        if not CHANNELS:
            x *= tl.load(to_end + at, mask=valid, other=0.0)[:, None]
        s_0 = _write(key, at_key, x, s_0, at_decay, 0, valid, K, BK, DECAYS, CHANNELS, DOT)
        if K > BK:
            s_1 = _write(key, at_key, x, s_1, at_decay, BK, valid, K, BK, DECAYS, CHANNELS, DOT)
        if K > 2 * BK:
            s_2 = _write(key, at_key, x, s_2, at_decay, 2 * BK, valid, K, BK, DECAYS, CHANNELS, DOT)
        if K > 3 * BK:
            s_3 = _write(key, at_key, x, s_3, at_decay, 3 * BK, valid, K, BK, DECAYS, CHANNELS, DOT)
        number += H
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target, s_0, mask=inside & (channel < K))
    if K > BK:
        tl.store(target + BK * V, s_1, mask=inside & (channel + BK < K))
    if K > 2 * BK:
        tl.store(target + 2 * BK * V, s_2, mask=inside & (channel + 2 * BK < K))
    if K > 3 * BK:
        tl.store(target + 3 * BK * V, s_3, mask=inside & (channel + 3 * BK < K))
