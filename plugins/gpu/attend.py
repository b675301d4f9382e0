"""Softmax attention over a paged cache as device functions, which `attention`, `attention_below` and `mla` share.

A program has M rows: queries by heads that read one head of keys. It walks the keys that any of its queries sees in
tiles of BN, with the running maximum and sum of arXiv 1805.02867; exponents are of 2. The walk of a row of one token is
cut into parts that a second launch combines (https://pytorch.org/blog/flash-decoding). Parts follow from the row's
length alone, tiles of keys from positions alone, so a result is the same in any batch.

Constants: H heads, G heads of a head of keys, HB of them in a program; D width of a value and of what it shares with a
key, R further width of a key; STRIDE numbers a cached token; VALUES_AT from a key to its value, 0: they are one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import dot, tanh

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)  # a maximum that no score is below


@triton.jit
def store_tokens(
    x, kv, table, token, position, held, column, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Write x [T, WIDTH] at some columns of the tokens that are held to kv, where their pages are."""
    page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
    valid = held[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + token.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=valid, other=0.0)
    at = (page * PAGE + position % PAGE) * STRIDE
    tl.store(kv + at[:, None] + column[None, :], value.to(kv.dtype.element_ty), mask=valid)


@triton.jit
def first_key(position, WINDOW: tl.constexpr):
    """The first key that a query sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return position * 0


@triton.jit
def end_key(position, count, LIMIT: tl.constexpr):
    """One past the last key that `count` queries from `position` on see; 0 where none is below LIMIT (0: no limit)."""
    if LIMIT > 0:
        return tl.minimum(position + count, LIMIT) * (position < LIMIT)
    else:
        return position + count


@triton.jit
def packed(count, kv_head, block, H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, M: tl.constexpr):
    """Query and head of each of M rows, and whether it is one, for `count` queries by HB heads."""
    row = tl.arange(0, M)
    query = row // HB
    within = block * HB + row % HB
    return query, kv_head * G + within, (query < count) & (within < G)


@triton.jit
def page_of(table, at, low, end, PAGE: tl.constexpr):
    """Pages of the keys at some positions; page 0 where a position is not in low..end-1."""
    return tl.load(table + at // PAGE, mask=(at >= low) & (at < end), other=0).to(tl.int64)


@triton.jit
def _score_block(q, cached, number, d, valid, held, s, D: tl.constexpr, DTYPE: tl.constexpr):
    """s and the part of queries times keys that some of the D numbers are."""
    q_d = tl.load(q + number[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    key = tl.load(cached + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0).to(DTYPE)
    return dot(q_d.to(DTYPE), tl.trans(key), s, DTYPE)


@triton.jit
def attend(
    q, q_rope, sinks, kv, table, first, count, position, low, end, kv_head, block,
    H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr,
    VALUES_AT: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values [M, BD] of M rows over keys low..end-1.

    The rows are the tokens first..first+count-1, the first of which is at `position`. No key before `low` or from `end`
    on is read. `sinks` (or None) are one more score. Where BC is less than BD, a score is summed over blocks of BC, and
    no query is held meanwhile.
    """
    query, head, valid = packed(count, kv_head, block, H, G, HB, M)
    place = position + query
    number = (first + query).to(tl.int64) * H + head
    d = tl.arange(0, BD)
    if BC == BD:
        q_d = tl.load(q + number[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(DTYPE)
    if R > 0:
        r = tl.arange(0, BR)
        valid_r = valid[:, None] & (r < R)[None, :]
        q_r = tl.load(q_rope + number[:, None] * R + r[None, :], mask=valid_r, other=0.0).to(DTYPE)
    if sinks is not None:
        top = tl.maximum(tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E, NOTHING)
        total = tl.full((M,), 1.0, tl.float32)
    else:
        top = tl.full((M,), NOTHING, tl.float32)
        total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BD), tl.float32)
    keys = kv + kv_head * D
    next_page = page_of(table, low // BN * BN + tl.arange(0, BN), low, end, PAGE)
    for start in range(low // BN * BN, end, BN):
        at = start + tl.arange(0, BN)
        held = (at >= low) & (at < end)
        cached = keys + (next_page * PAGE + at % PAGE)[:, None] * STRIDE
        next_page = page_of(table, at + BN, low, end, PAGE)
        in_d = held[:, None] & (d < D)[None, :]
        s = tl.zeros((M, BN), tl.float32)
        if BC == BD:
            key = tl.load(cached + d[None, :], mask=in_d, other=0.0).to(DTYPE)
            s = dot(q_d, tl.trans(key), s, DTYPE)
        else:
            for c in range(0, D, BC):
                s = _score_block(q, cached, number, c + tl.arange(0, BC), valid, held, s, D, DTYPE)
        if R > 0:
            in_r = held[:, None] & (r < R)[None, :]
            rotary = tl.load(cached + D + r[None, :], mask=in_r, other=0.0).to(DTYPE)
            s = dot(q_r, tl.trans(rotary), s, DTYPE)
        if SOFTCAP > 0:
            s = tanh(s * (SCALE / SOFTCAP)) * (SOFTCAP * LOG2_E)
        else:
            s *= SCALE * LOG2_E
        visible = held[None, :] & (at[None, :] <= place[:, None])
        if WINDOW > 0:
            visible &= place[:, None] - at[None, :] < WINDOW
        s = tl.where(visible, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if VALUES_AT > 0 or BC < BD:
            value = tl.load(cached + VALUES_AT + d[None, :], mask=in_d, other=0.0).to(DTYPE)
        else:
            value = key
        acc = dot(p, value, acc * shrink[:, None], DTYPE)
        top = higher
    return top, total, acc


@triton.jit
def part_size(low, end, BN: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """Keys of a part of keys low..end-1: PART, or the least multiple of it with which PARTS parts are enough."""
    return (end - low // BN * BN + PARTS * PART - 1) // (PARTS * PART) * PART


@triton.jit
def part_of(part, low, end, BN: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """First key and one past the last of a part of keys low..end-1: low >= end where there is no such part."""
    size = part_size(low, end, BN, PARTS, PART)
    begin = low // BN * BN + part * size
    return tl.maximum(begin, low), tl.minimum(begin + size, end)


@triton.jit
def store_part(
    part_values, part_maxima, part_sums, top, total, acc, row, part, kv_head, block,
    H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What a part of a row has found: [B, PARTS, H, D], and twice [B, PARTS, H]."""
    _, head, valid = packed(1, kv_head, block, H, G, HB, M)
    number = (row.to(tl.int64) * PARTS + part) * H + head
    d = tl.arange(0, BD)
    tl.store(part_maxima + number, top, mask=valid)
    tl.store(part_sums + number, total, mask=valid)
    tl.store(part_values + number[:, None] * D + d[None, :], acc, mask=valid[:, None] & (d < D)[None, :])


@triton.jit
def store_rows(
    out, total, acc, first, count, kv_head, block, kept,
    H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the results of M rows to out [T, H, D]: zero from query `kept` on."""
    query, head, valid = packed(count, kv_head, block, H, G, HB, M)
    d = tl.arange(0, BD)
    number = (first + query).to(tl.int64) * H + head
    scale = tl.where(query < kept, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(out + number[:, None] * D + d[None, :], acc * scale[:, None], mask=valid[:, None] & (d < D)[None, :])


@triton.jit
def combine_parts(
    part_values, part_maxima, part_sums, sinks, row, head, column, low, end,
    H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Some columns of the result of a row of one token and a head, from its parts over keys low..end-1."""
    part = tl.arange(0, PARTS)
    begin = low // BN * BN + part * part_size(low, end, BN, PARTS, PART)
    number = (row.to(tl.int64) * PARTS + part) * H + head
    top = tl.load(part_maxima + number, mask=begin < end, other=NOTHING)
    total = tl.load(part_sums + number, mask=begin < end, other=0.0)
    highest = tl.max(top, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    total = tl.sum(total * weight, 0)
    if sinks is not None:
        total += tl.exp2(sink - highest)
    held = (begin < end)[:, None] & (column < D)[None, :]
    values = tl.load(part_values + number[:, None] * D + column[None, :], mask=held, other=0.0)
    return tl.sum(values * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
