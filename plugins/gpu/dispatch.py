"""Which pairs of token and expert a tile has, in the Triton language. Pairs are numbered token by token.

The order of the pairs is that of a stable counting sort by expert: blocks count, one program adds up, blocks place.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.plan import Launch, Scratch, Sizes, cdiv, power_of_2

BLOCK = 512  # pairs


@triton.jit
def few_pairs(experts, count, pair, EXPERTS: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr):
    """The expert of a pair, it and the next BM - 1 pairs that have that expert, which of these there are, and whether
    it leads them: an expert's pairs 0, BM, 2 BM, ... do. There are `count` <= BP pairs."""
    number = tl.arange(0, BP)
    found = tl.load(experts + number, mask=number < count, other=EXPERTS).to(tl.int32)
    expert = tl.load(experts + pair).to(tl.int32)
    same = found == expert
    before = tl.sum((same & (number < pair)).to(tl.int32))
    later = (same & (number >= pair)).to(tl.int32)
    place = tl.cumsum(later, 0) - 1
    i = tl.arange(0, BM)
    chosen = (later[None, :] != 0) & (place[None, :] == i[:, None])
    pairs = tl.sum(tl.where(chosen, number[None, :], 0), axis=1)
    return expert, pairs, i < tl.sum(later), (expert < EXPERTS) & (before % BM == 0)


@triton.jit
def tile_pairs(order, table, tile, EXPERTS: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile (EXPERTS: there is no such tile), its pairs, and which of these there are."""
    number = tl.arange(0, BE)
    ends = tl.load(table + 2 * EXPERTS + number, mask=number < EXPERTS, other=0)
    expert = tl.sum(((ends <= tile) & (number < EXPERTS)).to(tl.int32))
    there = expert < EXPERTS
    start = tl.load(table + expert, mask=there, other=0)
    size = tl.load(table + EXPERTS + expert, mask=there, other=0)
    end = tl.load(table + 2 * EXPERTS + expert, mask=there, other=0)
    i = (tile - (end - (size + BM - 1) // BM)) * BM + tl.arange(0, BM)
    has = (i < size) & there
    return expert, tl.load(order + start + i, mask=has, other=0), has


@triton.jit
def count_pairs(expert, counts, block, EXPERTS: tl.constexpr, BE: tl.constexpr):
    """counts[block] = the pairs of each expert, of pairs with these experts."""
    runs = expert < EXPERTS
    found = tl.histogram(tl.where(runs, expert, 0), BE, mask=runs)
    number = tl.arange(0, BE)
    tl.store(counts + tl.cast(block, tl.int64) * EXPERTS + number, found, mask=number < EXPERTS)


@triton.jit
def add_up(counts, table, blocks, EXPERTS: tl.constexpr, BB: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """The pairs of each expert [BE]. `counts` becomes its pairs before each block; `table` [3, EXPERTS] gets its first
    place in the order, its pairs, and one past its last tile of BM pairs."""
    number = tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    for first in range(0, blocks, BB):
        block = first + tl.arange(0, BB)
        at = counts + block.to(tl.int64)[:, None] * EXPERTS + number[None, :]
        there = (block < blocks)[:, None] & (number < EXPERTS)[None, :]
        found = tl.load(at, mask=there, other=0)
        tl.store(at, total[None, :] + tl.cumsum(found, 0) - found, mask=there)
        total += tl.sum(found, axis=0)
    stored = number < EXPERTS
    tl.store(table + number, tl.cumsum(total, 0) - total, mask=stored)
    tl.store(table + EXPERTS + number, total, mask=stored)
    tl.store(table + 2 * EXPERTS + number, tl.cumsum((total + BM - 1) // BM, 0), mask=stored)
    return total


@triton.jit
def place_pairs(experts, counts, table, block, count, EXPERTS: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr):
    """The pairs of a block, their places in the order, and which have one: of `count` pairs by expert."""
    i = tl.arange(0, BP)
    pair = block * BP + i
    expert = tl.load(experts + pair, mask=pair < count, other=EXPERTS).to(tl.int32)
    rank = tl.zeros((BP,), tl.int32)
    for first in range(0, BP, BQ):
        j = first + tl.arange(0, BQ)
        other = tl.load(experts + block * BP + j, mask=block * BP + j < count, other=EXPERTS).to(tl.int32)
        before = (other[None, :] == expert[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    runs = expert < EXPERTS
    place = tl.load(table + expert, mask=runs, other=0) + rank
    place += tl.load(counts + tl.cast(block, tl.int64) * EXPERTS + expert, mask=runs, other=0)
    return pair, place, runs


@triton.jit
def experts_count(
    experts, T, counts,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """In a step of more than MOST tokens: a block of BP pairs."""
    if T <= MOST:
        return
    block = tl.program_id(0)
    pair = block * BP + tl.arange(0, BP)
    expert = tl.load(experts + pair, mask=pair < T * TOP_K, other=EXPERTS).to(tl.int32)
    count_pairs(expert, counts, block, EXPERTS, BE)


@triton.jit
def experts_offsets(
    counts, T, table,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    BP: tl.constexpr, BB: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """All blocks, by one program."""
    if T <= MOST:
        return
    add_up(counts, table, (T * TOP_K + BP - 1) // BP, EXPERTS, BB, BE, BM)


@triton.jit
def experts_order(
    experts, counts, table, T, order,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Puts the pairs of a block in their places."""
    if T <= MOST:
        return
    pair, place, runs = place_pairs(experts, counts, table, tl.program_id(0), T * TOP_K, EXPERTS, BP, BQ)
    tl.store(order + place, pair, mask=runs)


def blocks_at_once(width: int) -> int:
    """How many blocks are added up together, of `width` experts: a tile that fits the registers of eight warps."""
    return max(1, min(16, 8192 // width))


def dispatch(count: int, top_k: int, rows: int, most: int) -> tuple[list[Launch], dict[str, Scratch]]:
    """The launches that make `order` and `table` for tiles of `rows` pairs, in steps of more than `most` tokens."""

    def blocks(s: Sizes) -> Any:
        return cdiv(s.T * top_k, BLOCK)

    def many(s: Sizes) -> bool:
        return bool(most < s.T)

    pairs = {"MOST": most, "EXPERTS": count, "TOP_K": top_k, "BP": BLOCK}
    width = power_of_2(count)
    summed = {"BE": width, "BB": blocks_at_once(width), "BM": rows}
    launches = [
        Launch(experts_count, lambda s: (blocks(s),), ("counts",), pairs | {"BE": width}, when=many),
        Launch(experts_offsets, lambda s: (1,), ("counts", "table"), pairs | summed, num_warps=8, when=many),
        Launch(experts_order, lambda s: (blocks(s),), ("order",), pairs | {"BQ": 8}, num_warps=8, when=many),
    ]
    scratch = {
        "counts": Scratch(lambda s: (blocks(s), count), "int32"),
        "table": Scratch(lambda s: (3, count), "int32"),
        "order": Scratch(lambda s: (s.T * top_k,), "int32"),
    }
    return launches, scratch
