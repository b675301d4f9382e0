"""Pairs of token and expert by expert, each counted against those of its expert that come before it.

The pairs of real tokens are put in order by expert (`plugins/gpu/dispatch`). Those that find no place wait by weight,
and one program lets them go on, one after another: who goes first decides what is left for the next.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu import dispatch
from hybridtrt.plugins.gpu.dispatch import add_up, count_pairs, place_pairs
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, Sizes, cdiv, power_of_2


@triton.jit
def _real_rows(held, cu_seqlens, T, B, BB: tl.constexpr):
    """Whether any row is held, and the tokens of those that are; where none is, all are real."""
    rows = 0
    tokens = 0
    for first in range(0, B, BB):
        row = first + tl.arange(0, BB)
        there = row < B
        real = tl.load(held + row, mask=there, other=0)
        length = tl.load(cu_seqlens + row + 1, mask=there, other=0) - tl.load(cu_seqlens + row, mask=there, other=0)
        rows += tl.sum(real)
        tokens += tl.sum(real * length)
    return rows > 0, tl.where(rows > 0, tokens, T)


@triton.jit
def _row_of(cu_seqlens, token, B):
    """The row of each token, by bisection."""
    low = tl.zeros_like(token)
    high = low + B - 1
    span = B
    while span > 1:
        middle = (low + high + 1) // 2
        at_or_after = tl.load(cu_seqlens + middle) <= token
        low = tl.where(at_or_after, middle, low)
        high = tl.where(at_or_after, high, middle - 1)
        span = (span + 1) // 2
    return low


@triton.jit
def capacity_rows(state_dst, block_tables, B, P, held, BP: tl.constexpr):
    """held[row] = whether the row has a slot or a page: padding has none."""
    row = tl.program_id(0)
    found = tl.load(state_dst + row) != 0
    if block_tables is not None:
        for first in range(0, P, BP):
            page = first + tl.arange(0, BP)
            number = tl.load(block_tables + tl.cast(row, tl.int64) * P + page, mask=page < P, other=0)
            found = found | (tl.max(tl.abs(number)) != 0)
    tl.store(held + row, found.to(tl.int32))


@triton.jit
def capacity_ask(
    weights, experts, cu_seqlens, held, T, B, out_0, out_1, places, waiting, asked, counts,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RANKED: tl.constexpr,
    BP: tl.constexpr, BB: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The expert that each pair of a block asks, EXPERTS for none; what asks none gets what it gets."""
    any_held, _ = _real_rows(held, cu_seqlens, T, B, BB)
    block = tl.program_id(0)
    pair = block * BP + tl.arange(0, BP)
    there = pair < T * TOP_K
    token = tl.where(there, pair // TOP_K, 0)
    real = tl.load(held + _row_of(cu_seqlens, token, B)) != 0
    real = there & (real | (any_held == 0))
    choice = pair % TOP_K
    at = token.to(tl.int64) * RANKED + choice
    expert = tl.load(experts + at, mask=real, other=EXPERTS).to(tl.int32)
    weight = tl.load(weights + at, mask=real, other=0.0)
    asking = expert < EXPERTS
    free = there & (expert >= EXPERTS)
    tl.store(out_0 + pair, weight, mask=free)
    tl.store(out_1 + pair, expert, mask=free)
    tl.store(places + pair, tl.where(real, choice, -1), mask=free)
    tl.store(waiting + pair, float("nan"), mask=free)
    expert = tl.where(asking, expert, EXPERTS)
    tl.store(asked + pair, expert, mask=there)
    count_pairs(expert, counts, block, EXPERTS, BE)


@triton.jit
def capacity_offsets(
    counts, cu_seqlens, held, T, B, table, most, out_2, out_3,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, FACTOR: tl.constexpr,
    BP: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`most` = the places of an expert, as `expert_capacity` has it; the tokens that each takes and refuses."""
    _, tokens = _real_rows(held, cu_seqlens, T, B, BR)
    tokens = tokens.to(tl.float64)
    places = tl.full((), FACTOR, tl.float64) * tokens * TOP_K / EXPERTS * tl.full((), 1 - 1e-12, tl.float64)
    capacity = tl.ceil(tl.minimum(places, tokens)).to(tl.int32)
    tl.store(most, capacity)
    total = add_up(counts, table, (T * TOP_K + BP - 1) // BP, EXPERTS, BB, BE, BM)
    number = tl.arange(0, BE)
    load = tl.minimum(total, capacity)
    tl.store(out_2 + number, load, mask=number < EXPERTS)
    tl.store(out_3 + number, total - load, mask=number < EXPERTS)


@triton.jit
def capacity_order(
    weights, asked, counts, table, T, order, keys,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RANKED: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The pairs of a block in the order, and their weights; NaN counts as the least."""
    pair, place, runs = place_pairs(asked, counts, table, tl.program_id(0), T * TOP_K, EXPERTS, BP, BQ)
    at = (pair // TOP_K).to(tl.int64) * RANKED + pair % TOP_K
    weight = tl.load(weights + at, mask=runs, other=0.0).to(tl.float32)
    tl.store(order + place, pair, mask=runs)
    tl.store(keys + place, tl.where(weight == weight, weight, -float("inf")), mask=runs)


@triton.jit
def capacity_choose(
    weights, order, keys, asked, table, most, T, out_0, out_1, places, waiting,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RANKED: tl.constexpr, BM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """BM places of the order: a pair keeps its expert if fewer than `most` pairs of that are before it."""
    last = EXPERTS - 1
    count = tl.load(table + last) + tl.load(table + EXPERTS + last)
    first = tl.program_id(0) * BM
    if first >= count:
        return
    place = first + tl.arange(0, BM)
    there = place < count
    pair = tl.load(order + place, mask=there, other=0)
    key = tl.load(keys + place, mask=there, other=0.0)
    expert = tl.load(asked + pair, mask=there, other=0)
    start = tl.load(table + expert, mask=there, other=T * TOP_K)
    end = tl.where(there, start + tl.load(table + EXPERTS + expert, mask=there, other=0), 0)
    better = tl.zeros((BM,), tl.int32)
    for other_first in range(tl.min(start), tl.max(end), BQ):
        other = other_first + tl.arange(0, BQ)
        other_key = tl.load(keys + other, mask=other < count, other=0.0)[None, :]
        same = (other[None, :] >= start[:, None]) & (other[None, :] < end[:, None])
        ahead = (other_key > key[:, None]) | ((other_key == key[:, None]) & (other[None, :] < place[:, None]))
        better += tl.sum((same & ahead).to(tl.int32), axis=1)
    kept = better < tl.load(most)
    choice = pair % TOP_K
    weight = tl.load(weights + (pair // TOP_K).to(tl.int64) * RANKED + choice, mask=there & kept, other=0.0)
    tl.store(out_0 + pair, weight, mask=there)
    tl.store(out_1 + pair, tl.where(kept, expert, EXPERTS), mask=there)
    tl.store(places + pair, tl.where(kept, choice, -1), mask=there)
    tl.store(waiting + pair, tl.where(kept, float("nan"), key), mask=there)


@triton.jit
def capacity_queue(waiting, T, queue, TOP_K: tl.constexpr, BM: tl.constexpr, BQ: tl.constexpr):
    """BM pairs: those that wait, in their order among all that do. `waiting` has their weights, else NaN."""
    pair = tl.program_id(0) * BM + tl.arange(0, BM)
    count = T * TOP_K
    key = tl.load(waiting + pair, mask=pair < count, other=float("nan"))
    waits = key == key
    if tl.max(waits.to(tl.int32)) == 0:
        return
    before = tl.zeros((BM,), tl.int32)
    for first in range(0, count, BQ):
        other = first + tl.arange(0, BQ)
        other_key = tl.load(waiting + other, mask=other < count, other=float("nan"))[None, :]
        ahead = (other_key > key[:, None]) | ((other_key == key[:, None]) & (other[None, :] < pair[:, None]))
        before += tl.sum(ahead.to(tl.int32), axis=1)
    tl.store(queue + before, pair, mask=waits)


@triton.jit
def capacity_go_on(
    weights, experts, queue, most, out_0, out_1, out_2, out_3, places,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RANKED: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Each of the queue takes the first expert beyond the chosen that has room and that its token has not."""
    number = tl.arange(0, BE)
    waiting = tl.sum(tl.load(out_3 + number, mask=number < EXPERTS, other=0))
    capacity = tl.load(most)
    place = TOP_K + tl.arange(0, BR)
    for i in range(waiting):
        pair = tl.load(queue + i)
        token = pair // TOP_K
        order = token.to(tl.int64) * RANKED
        expert = tl.load(experts + order + place, mask=place < RANKED, other=EXPERTS).to(tl.int32)
        load = tl.load(out_2 + expert, mask=expert < EXPERTS, other=-1)
        open = (place < RANKED) & (load < capacity)
        for choice in range(TOP_K):
            open = open & (place != tl.load(places + token * TOP_K + choice))
        taken = tl.min(tl.where(open, place, RANKED))
        found = taken < RANKED
        chosen = tl.load(experts + order + taken, mask=found, other=EXPERTS).to(tl.int32)
        bounded = found & (chosen < EXPERTS)
        tl.store(out_0 + pair, tl.load(weights + order + taken, mask=found, other=0.0), mask=found)
        tl.store(out_1 + pair, chosen, mask=found)
        tl.store(places + pair, taken, mask=found)
        now = tl.load(out_2 + chosen, mask=bounded, other=0)
        tl.debug_barrier()  # all have read the load
        tl.store(out_2 + chosen, now + 1, mask=bounded)
        tl.debug_barrier()  # the next reads it, and `places`


def capacity(call: Call) -> Plan:
    """Any number of experts, choices and ranked experts."""
    ranked, top_k = int(call.operand("experts").shape[1]), int(call.attributes["top_k"])
    count, block = int(call.attributes["num_experts"]), dispatch.BLOCK
    width, tile = power_of_2(count), 64
    pairs = {"EXPERTS": count, "TOP_K": top_k}
    ranks = pairs | {"RANKED": ranked}

    def blocks(s: Sizes) -> Any:
        return cdiv(s.T * top_k, block)

    def tiles(s: Sizes) -> Any:
        return cdiv(s.T * top_k, tile)

    summed = {"FACTOR": call.attributes["factor"], "BP": block, "BR": 256, "BB": dispatch.blocks_at_once(width)}
    launches = [
        Launch(capacity_rows, lambda s: (s.B,), ("held",), {"BP": 128}),
        Launch(
            capacity_ask,
            lambda s: (blocks(s),),
            ("out_0", "out_1", "places", "waiting", "asked", "counts"),
            ranks | {"BP": block, "BB": 256, "BE": width},
        ),
        Launch(
            capacity_offsets,
            lambda s: (1,),
            ("counts", "table", "most", "out_2", "out_3"),
            pairs | summed | {"BE": width, "BM": tile},
            num_warps=8,
        ),
        Launch(
            capacity_order,
            lambda s: (blocks(s),),
            ("order", "keys"),
            ranks | {"BP": block, "BQ": 8},
            num_warps=8,
        ),
        Launch(
            capacity_choose,
            lambda s: (tiles(s),),
            ("out_0", "out_1", "places", "waiting"),
            ranks | {"BM": tile, "BQ": 64},
        ),
    ]
    whole_numbers = ("places", "asked", "order", "queue")
    scratch = {name: Scratch(lambda s: (s.T * top_k,), "int32") for name in whole_numbers}
    scratch |= {name: Scratch(lambda s: (s.T * top_k,)) for name in ("waiting", "keys")}
    scratch |= {
        "held": Scratch(lambda s: (s.B,), "int32"),
        "counts": Scratch(lambda s: (blocks(s), count), "int32"),
        "table": Scratch(lambda s: (3, count), "int32"),
        "most": Scratch(lambda s: (1,), "int32"),
    }
    if call.attributes["overflow"] == "next_best" and ranked > top_k:
        beyond = power_of_2(ranked - top_k)
        launches += [
            Launch(
                capacity_queue,
                lambda s: (tiles(s),),
                ("queue",),
                {"TOP_K": top_k, "BM": tile, "BQ": 64},
            ),
            Launch(
                capacity_go_on,
                lambda s: (1,),
                ("out_0", "out_1", "out_2", "places"),
                ranks | {"BE": width, "BR": beyond},
                num_warps=max(1, min(8, beyond // 512)),
            ),
        ]
    return Plan(tuple(launches), scratch)
