"""Paged attention in three kinds of launches: the keys and values of a step go into their pages, then longer rows
attend in tiles of queries, rows of one token in parts of their keys. Heads that read one head of keys share a program.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.attend import (
    attend,
    combine_parts,
    end_key,
    first_key,
    part_of,
    store_part,
    store_rows,
    store_tokens,
)
from hybridtrt.plugins.gpu.device import tile
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, cdiv, power_of_2, tiles
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.spec import require

HEAD_DIMS = range(1, 257)
PARTS = 64  # into which the keys of a row of one token are cut, at most; fewer where there are many heads
PROGRAMS = 256  # of a row of one token, about
PART = 256  # keys of a part, at least
STORED = 16  # tokens of a program that stores


@triton.jit
def attention_store(
    k, v, cu_seqlens, context_lens, block_tables, B, P, kv,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Keys and values of BT tokens at positions below LIMIT (0: all), BC numbers of each."""
    row, start, first, end = tile(cu_seqlens, B, tl.program_id(0), BT)
    if first >= end:
        return
    token = first + tl.arange(0, BT)
    position = tl.load(context_lens + row) + token - start
    held = token < end
    if LIMIT > 0:
        held &= position < LIMIT
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    table = block_tables + row.to(tl.int64) * P
    store_tokens(k, kv, table, token, position, held, column, WIDTH, 2 * WIDTH, PAGE)
    store_tokens(v, kv + WIDTH, table, token, position, held, column, WIDTH, 2 * WIDTH, PAGE)


@triton.jit
def attention_tile(
    q, sinks, kv, cu_seqlens, context_lens, block_tables, B, P, out,
    H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """M // HB tokens of a longer row and HB heads. Late tokens see most keys and go first."""
    row, start, first, end = tile(cu_seqlens, B, tl.num_programs(0) - 1 - tl.program_id(0), M // HB)
    if (first >= end) | (end - start == 1):
        return
    block = tl.program_id(1) % tl.cdiv(G, HB)
    kv_head = tl.program_id(1) // tl.cdiv(G, HB)
    position = tl.load(context_lens + row) + first - start
    count = tl.minimum(end - first, M // HB)
    end = end_key(position, count, LIMIT)
    _, total, acc = attend(
        q, None, sinks, kv, block_tables + row.to(tl.int64) * P, first, count, position,
        first_key(position, WINDOW), end, kv_head, block,
        H, G, HB, D, 0, 2 * H // G * D, H // G * D, PAGE, SCALE, SOFTCAP, WINDOW, M, BN, BD, BD, 0, DTYPE,
    )  # fmt: skip
    store_rows(out, total, acc, first, count, kv_head, block, end - position, H, G, HB, D, M, BD)


@triton.jit
def attention_single(
    q, sinks, kv, cu_seqlens, context_lens, block_tables, P, out,
    H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """HB heads of a row of one token, which sees few keys."""
    row = tl.program_id(1)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    block = tl.program_id(0) % tl.cdiv(G, HB)
    kv_head = tl.program_id(0) // tl.cdiv(G, HB)
    position = tl.load(context_lens + row)
    end = end_key(position, 1, LIMIT)
    _, total, acc = attend(
        q, None, sinks, kv, block_tables + row.to(tl.int64) * P, token, 1, position,
        first_key(position, WINDOW), end, kv_head, block,
        H, G, HB, D, 0, 2 * H // G * D, H // G * D, PAGE, SCALE, SOFTCAP, WINDOW, M, BN, BD, BD, 0, DTYPE,
    )  # fmt: skip
    store_rows(out, total, acc, token, 1, kv_head, block, end - position, H, G, HB, D, M, BD)


@triton.jit
def attention_part(
    q, kv, cu_seqlens, context_lens, block_tables, P, part_values, part_maxima, part_sums,
    H: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """HB heads of a row of one token, and a part of its keys."""
    row = tl.program_id(2)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    position = tl.load(context_lens + row)
    part = tl.program_id(1)
    low, end = part_of(part, first_key(position, WINDOW), end_key(position, 1, LIMIT), BN, PARTS, PART)
    if low >= end:
        return
    block = tl.program_id(0) % tl.cdiv(G, HB)
    kv_head = tl.program_id(0) // tl.cdiv(G, HB)
    top, total, acc = attend(
        q, None, None, kv, block_tables + row.to(tl.int64) * P, token, 1, position, low, end, kv_head, block,
        H, G, HB, D, 0, 2 * H // G * D, H // G * D, PAGE, SCALE, SOFTCAP, WINDOW, M, BN, BD, BD, 0, DTYPE,
    )  # fmt: skip
    store_part(
        part_values, part_maxima, part_sums, top, total, acc, row, part, kv_head, block, H, G, HB, D, PARTS, M, BD
    )  # fmt: skip


@triton.jit
def attention_combine(
    sinks, part_values, part_maxima, part_sums, cu_seqlens, context_lens, out,
    H: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr, WINDOW: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The result of a row of one token and a head from its parts."""
    row = tl.program_id(0)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    head = tl.program_id(1)
    column = tl.arange(0, BD)
    position = tl.load(context_lens + row)
    end = end_key(position, 1, LIMIT)
    y = combine_parts(
        part_values, part_maxima, part_sums, sinks, row, head, column, first_key(position, WINDOW), end,
        H, D, BN, PARTS, PART,
    )  # fmt: skip
    tl.store(out + (token.to(tl.int64) * H + head) * D + column, y, mask=column < D)


def attention(call: Call) -> Plan:
    """Head sizes up to 256, any numbers of heads, pages of any size."""
    return attention_launches(call, 0)


def attention_launches(call: Call, limit: int) -> Plan:
    """`attention` of the tokens at positions below `limit` (0: all); zero for the others, which are not stored."""
    _, heads, head_dim = (int(dim) for dim in (0, *call.operand("q").shape[1:]))
    kv_heads, page = int(call.operand("k").shape[1]), int(call.operand("kv").shape[1])
    require(head_dim in HEAD_DIMS, f"head_dim {head_dim} is not in {HEAD_DIMS[0]}..{HEAD_DIMS[-1]}")
    dtype = call.operand("q").dtype
    window, group, width = call.attributes.get("window") or 0, heads // kv_heads, kv_heads * head_dim
    bd, bc = max(16, power_of_2(head_dim)), min(128, power_of_2(width))
    store = Launch(
        attention_store,
        lambda s: (tiles(s, STORED), cdiv(width, bc)),
        ("kv",),
        {"WIDTH": width, "PAGE": page, "LIMIT": limit, "BT": STORED, "BC": bc},
    )
    seen: dict[str, Any] = {"H": heads, "D": head_dim, "BD": bd, "LIMIT": limit, "WINDOW": window}
    shared = seen | {
        "G": group,
        "PAGE": page,
        "SCALE": float(call.attributes["scale"]),
        "SOFTCAP": float(call.attributes.get("softcap") or 0.0),
        "DTYPE": triton_dtype(dtype),
    }
    rows, keys, stages = longer_tile(bd, dtype)
    if limit:  # which takes more registers
        keys = min(keys, 16 if dtype == "float32" else 32)
    hb = min(group, rows)
    longer = Launch(
        attention_tile,
        lambda s: (tiles(s, rows // hb), kv_heads * cdiv(group, hb)),
        ("out",),
        shared | {"HB": hb, "M": rows, "BN": keys},
        rows="longer",
        num_warps=8 if rows * bd > 4096 else 4,
        num_stages=stages,
    )
    hb_single, keys_single, stages = single_tile(group, bd, dtype)
    blocks = kv_heads * cdiv(group, hb_single)
    one = shared | {"HB": hb_single, "M": max(16, power_of_2(hb_single)), "BN": keys_single}
    most = limit or (window + keys_single if window else PARTS * PART)  # keys that are walked
    number = min(power_of_2(cdiv(most, PART)), PARTS, max(8, power_of_2(PROGRAMS // blocks)))
    if number == 1:
        single = Launch(attention_single, lambda s: (blocks, s.B), ("out",), one, rows="single", num_stages=stages)
        return Plan((store, longer, single))
    cut = {"PARTS": number, "PART": PART}
    part = Launch(
        attention_part,
        lambda s: (blocks, number, s.B),
        ("part_values", "part_maxima", "part_sums"),
        one | cut,
        rows="single",
        num_stages=stages,
    )
    combine = Launch(
        attention_combine, lambda s: (s.B, heads), ("out",), seen | cut | {"BN": keys_single}, rows="single"
    )
    return Plan((store, longer, part, combine), part_scratch(number, heads, head_dim))


def longer_tile(width: int, dtype: str) -> tuple[int, int, int]:
    """Rows and keys of a tile of longer rows, and stages of the loads: as many as registers and shared memory hold."""
    if dtype == "float32":
        return max(16, min(64, 4096 // width)), max(16, min(64, 2048 // width)), 2
    if width > 128:
        return 64, 32, 2
    return (128 if width > 64 else 64), 64, 3


def single_tile(group: int, width: int, dtype: str) -> tuple[int, int, int]:
    """Heads of a program of rows of one token, the keys of a tile, and stages of the loads."""
    if dtype == "float32":
        return min(group, 16), max(16, min(64, 2048 // width)), 2
    return min(group, 64), max(32, min(128, 8192 // width)), 3


def part_scratch(parts: int, heads: int, width: int) -> dict[str, Scratch]:
    """Memory for what the parts of rows of one token find."""
    return {
        "part_values": Scratch(lambda s: (s.B, parts, heads, width)),
        "part_maxima": Scratch(lambda s: (s.B, parts, heads)),
        "part_sums": Scratch(lambda s: (s.B, parts, heads)),
    }
