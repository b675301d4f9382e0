"""Latent attention, absorbed: queries go through up_k into the latent space, where all heads read one head of keys,
whose first part is the value, too; the result goes through up_v. So for a cached token nothing but the cache is read.
`latents` [T, H, D] holds the queries first, then what they attended.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.attention.gpu import STORED, part_scratch
from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.attend import attend, combine_parts, part_of, store_part, store_rows, store_tokens
from hybridtrt.plugins.gpu.device import dot, tile
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, cdiv, power_of_2, tiles
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.spec import require

RANKS, ROPE_DIMS = range(1, 513), range(1, 129)
PARTS = 32  # into which the keys of a row of one token are cut, at most; fewer where there are many heads
PROGRAMS = 64  # of a row of one token, about
PART = 512  # keys of a part, at least


@triton.jit
def mla_store(
    latent, k_rope, cu_seqlens, context_lens, block_tables, B, P, kv,
    D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Latents and rotary keys of BT tokens."""
    row, start, first, end = tile(cu_seqlens, B, tl.program_id(0), BT)
    if first >= end:
        return
    token = first + tl.arange(0, BT)
    position = tl.load(context_lens + row) + token - start
    table = block_tables + row.to(tl.int64) * P
    store_tokens(latent, kv, table, token, position, token < end, tl.arange(0, BD), D, D + R, PAGE)
    store_tokens(k_rope, kv + D, table, token, position, token < end, tl.arange(0, BR), R, D + R, PAGE)


@triton.jit
def _head_product(
    x, weight, T, y, H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_N: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """y [T, H, N] = x [T, H, K] by a matrix of one head, for BT tokens and BN columns."""
    token = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None]
    number = token.to(tl.int64) * H + tl.program_id(1)
    n = (tl.program_id(2) * BN + tl.arange(0, BN))[None, :]
    acc = tl.zeros((BT, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(x + number * K + k[None, :], mask=(token < T) & (k < K)[None, :], other=0.0)
        at = k[:, None] * STRIDE_K + n * STRIDE_N
        right = tl.load(weight + at, mask=(k < K)[:, None] & (n < N), other=0.0)
        acc = dot(left, right, acc, DTYPE)
    tl.store(y + number * N + n, acc.to(y.dtype.element_ty), mask=(token < T) & (n < N))


@triton.jit
def mla_absorb(
    q_nope, up, T, latents, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """q_nope up_k: queries against latents."""
    weight = up + tl.program_id(1).to(tl.int64) * (N + V) * D
    _head_product(q_nope, weight, T, latents, H, N, D, D, 1, BT, BK, BN, DTYPE)


@triton.jit
def mla_values(
    latents, up, T, out, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """up_v attended: values from weighted latents."""
    weight = up + (tl.program_id(1).to(tl.int64) * (N + V) + N) * D
    _head_product(latents, weight, T, out, H, D, V, 1, D, BT, BK, BN, DTYPE)


@triton.jit
def mla_tile(
    latents, q_rope, kv, cu_seqlens, context_lens, block_tables, B, P,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """M // HB tokens of a longer row and HB heads, in place. Late tokens see most keys and go first."""
    row, start, first, end = tile(cu_seqlens, B, tl.num_programs(0) - 1 - tl.program_id(0), M // HB)
    if (first >= end) | (end - start == 1):
        return
    position = tl.load(context_lens + row) + first - start
    count = tl.minimum(end - first, M // HB)
    block = tl.program_id(1)
    _, total, acc = attend(
        latents, q_rope, None, kv, block_tables + row.to(tl.int64) * P, first, count, position,
        position * 0, position + count, 0, block,
        H, H, HB, D, R, D + R, 0, PAGE, SCALE, 0.0, 0, M, BN, BD, BC, BR, DTYPE,
    )  # fmt: skip
    tl.debug_barrier()  # the queries have been read
    store_rows(latents, total, acc, first, count, 0, block, count, H, H, HB, D, M, BD)


@triton.jit
def mla_part(
    latents, q_rope, kv, cu_seqlens, context_lens, block_tables, P, part_values, part_maxima, part_sums,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """HB heads of a row of one token, and a part of its keys."""
    row = tl.program_id(2)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    position = tl.load(context_lens + row)
    part = tl.program_id(1)
    low, end = part_of(part, position * 0, position + 1, BN, PARTS, PART)
    if low >= end:
        return
    block = tl.program_id(0)
    top, total, acc = attend(
        latents, q_rope, None, kv, block_tables + row.to(tl.int64) * P, token, 1, position, low, end, 0, block,
        H, H, HB, D, R, D + R, 0, PAGE, SCALE, 0.0, 0, M, BN, BD, BC, BR, DTYPE,
    )  # fmt: skip
    store_part(
        part_values, part_maxima, part_sums, top, total, acc, row, part, 0, block, H, H, HB, D, PARTS, M, BD
    )  # fmt: skip


@triton.jit
def mla_combine(
    part_values, part_maxima, part_sums, cu_seqlens, context_lens, latents,
    H: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BC columns of a row of one token and a head from its parts."""
    row = tl.program_id(0)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    head = tl.program_id(1)
    column = tl.program_id(2) * BC + tl.arange(0, BC)
    position = tl.load(context_lens + row)
    y = combine_parts(
        part_values, part_maxima, part_sums, None, row, head, column, position * 0, position + 1, H, D, BN, PARTS, PART
    )  # fmt: skip
    at = latents + (token.to(tl.int64) * H + head) * D + column
    tl.store(at, y.to(latents.dtype.element_ty), mask=column < D)


def mla(call: Call) -> Plan:
    """Ranks up to 512, rotary keys up to 128 wide, any number of heads, pages of any size."""
    heads, nope_dim = (int(dim) for dim in call.operand("q_nope").shape[1:])
    rope_dim, rank = int(call.operand("q_rope").shape[2]), int(call.operand("latent").shape[1])
    v_dim, page = int(call.results[0].shape[2]), int(call.operand("kv").shape[1])
    require(rank in RANKS, f"rank {rank} is not in {RANKS[0]}..{RANKS[-1]}")
    require(rope_dim in ROPE_DIMS, f"rope_dim {rope_dim} is not in {ROPE_DIMS[0]}..{ROPE_DIMS[-1]}")
    dtype = call.operand("q_nope").dtype
    bd, br, bc = max(16, power_of_2(rank)), max(16, power_of_2(rope_dim)), min(128, power_of_2(rank))
    store = Launch(
        mla_store,
        lambda s: (tiles(s, STORED),),
        ("kv",),
        {"D": rank, "R": rope_dim, "PAGE": page, "BT": STORED, "BD": bd, "BR": br},
    )
    products: dict[str, Any] = {"H": heads, "N": nope_dim, "V": v_dim, "D": rank, "DTYPE": triton_dtype(dtype)}
    bt, bk, bn, warps = (64, 32, 64, 4) if dtype == "float32" else (64, 64, 128, 8)
    products |= {"BT": bt, "BK": bk, "BN": bn}
    absorb = Launch(
        mla_absorb, lambda s: (cdiv(s.T, bt), heads, cdiv(rank, bn)), ("latents",), products, num_warps=warps
    )
    values = Launch(mla_values, lambda s: (cdiv(s.T, bt), heads, cdiv(v_dim, bn)), ("out",), products, num_warps=warps)
    rows, keys, block = latent_tile(bd, dtype)
    hb = min(heads, rows)
    blocks = cdiv(heads, hb)
    shared: dict[str, Any] = {
        **{"H": heads, "HB": hb, "D": rank, "R": rope_dim, "PAGE": page, "SCALE": float(call.attributes["scale"])},
        **{"BN": keys, "BD": bd, "BC": block, "BR": br, "DTYPE": triton_dtype(dtype)},
    }
    longer = Launch(
        mla_tile,
        lambda s: (tiles(s, rows // hb), blocks),
        ("latents",),
        shared | {"M": rows},
        rows="longer",
        num_warps=8,
    )
    number = min(PARTS, max(8, power_of_2(PROGRAMS // blocks)))
    cut = {"PARTS": number, "PART": PART}
    part = Launch(
        mla_part,
        lambda s: (blocks, number, s.B),
        ("part_values", "part_maxima", "part_sums"),
        shared | cut | {"M": max(16, power_of_2(hb))},
        rows="single",
        num_warps=8,
    )
    combine = Launch(
        mla_combine,
        lambda s: (s.B, heads, cdiv(rank, bc)),
        ("latents",),
        {"H": heads, "D": rank, "BN": keys, "BC": bc, **cut},
        rows="single",
    )
    scratch = {"latents": Scratch(lambda s: (s.T, heads, rank), dtype), **part_scratch(number, heads, rank)}
    return Plan((store, absorb, longer, part, combine, values), scratch)


def latent_tile(width: int, dtype: str) -> tuple[int, int, int]:
    """Queries by heads, keys, and width of a block of scores, as many as registers and shared memory hold."""
    return (16, 16, min(width, 64)) if dtype == "float32" else (32, 32, width)
