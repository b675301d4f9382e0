"""Two launches for rows of one token and two for longer ones, in chunks: the scores of each token for the compressed
rows, into scratch, and the keys' new state; their softmax over the values, and the values' new state.

Programs are rows, KV heads with their query heads, and blocks of ranks or of value channels. A token's weights e are
its position's row of the projection.
"""

from __future__ import annotations

from typing import Any, Literal

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, block, cdiv
from hybridtrt.plugins.gpu.recurrence import read_chunk, write_chunk
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.spec import require

SIZES = range(1, 257)


@triton.jit
def _softmax(scores, valid):
    """Over the last axis; 0 where not valid."""
    scores = tl.where(valid, scores, -float("inf"))
    p = tl.exp(scores - tl.max(scores, axis=len(scores.shape) - 1, keep_dims=True))
    return p / tl.sum(p, axis=len(scores.shape) - 1, keep_dims=True)


@triton.jit
def low_rank_scores_single(
    q, k, projection, keys, positions, cu_seqlens, state_src, state_dst, scores,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SCALE: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A row of one token, one KV head and BR ranks."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    channel = tl.arange(0, BD)
    rank = tl.program_id(2) * BR + tl.arange(0, BR)
    inside = (channel < D)[:, None] & (rank < R)[None, :]
    at = channel[:, None] * R + rank[None, :]
    source = keys + (tl.load(state_src + row).to(tl.int64) * H + head) * (D * R)
    target = keys + (tl.load(state_dst + row).to(tl.int64) * H + head) * (D * R)
    s = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    at_head = token.to(tl.int64) * H + head
    position = tl.load(positions + token).to(tl.int64)
    e = tl.load(projection + position * R + rank, mask=rank < R, other=0.0).to(tl.float32)
    key = tl.load(k + at_head * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    s += key[:, None] * e[None, :]
    for member in range(GROUP):
        at_query = at_head * GROUP + member
        query = tl.load(q + at_query * D + channel, mask=channel < D, other=0.0).to(tl.float32) * SCALE
        tl.store(scores + at_query * R + rank, tl.sum(query[:, None] * s, axis=0), mask=rank < R)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target + at, s, mask=inside)


@triton.jit
def low_rank_values_single(
    v, projection, values, positions, cu_seqlens, state_src, state_dst, scores, out,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A row of one token, one KV head and BD value channels."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    rank = tl.arange(0, BR)
    value = tl.program_id(2) * BD + tl.arange(0, BD)
    inside = (rank < R)[:, None] & (value < D)[None, :]
    at = rank[:, None] * D + value[None, :]
    source = values + (tl.load(state_src + row).to(tl.int64) * H + head) * (R * D)
    target = values + (tl.load(state_dst + row).to(tl.int64) * H + head) * (R * D)
    s = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    at_head = token.to(tl.int64) * H + head
    position = tl.load(positions + token).to(tl.int64)
    e = tl.load(projection + position * R + rank, mask=rank < R, other=0.0).to(tl.float32)
    x = tl.load(v + at_head * D + value, mask=value < D, other=0.0).to(tl.float32)
    s += e[:, None] * x[None, :]
    for member in range(GROUP):
        at_query = at_head * GROUP + member
        p = _softmax(tl.load(scores + at_query * R + rank, mask=rank < R, other=0.0), rank < R)
        tl.store(out + at_query * D + value, tl.sum(p[:, None] * s, axis=0), mask=value < D)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target + at, s, mask=inside)


@triton.jit
def low_rank_scores_walk(
    q, k, projection, keys, positions, cu_seqlens, state_src, state_dst, scores,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SCALE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A longer row, one KV head and BR ranks, chunk by chunk."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start == 1:
        return
    channel = tl.arange(0, BD)[None, :]
    rank = (tl.program_id(2) * BR + tl.arange(0, BR))[None, :]
    inside = (tl.arange(0, BD) < D)[:, None] & (rank < R)
    at = tl.arange(0, BD)[:, None] * R + rank
    source = keys + (tl.load(state_src + row).to(tl.int64) * H + head) * (D * R)
    target = keys + (tl.load(state_dst + row).to(tl.int64) * H + head) * (D * R)
    s = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    for first in range(start, end, BT):
        token = first + tl.arange(0, BT)
        there = (token < end)[:, None]
        at_head = (token.to(tl.int64) * H + head)[:, None]
        position = tl.load(positions + token, mask=token < end, other=0).to(tl.int64)[:, None]
        e = tl.load(projection + position * R + rank, mask=there & (rank < R), other=0.0).to(tl.float32)
        key = tl.load(k + at_head * D + channel, mask=there & (channel < D), other=0.0).to(tl.float32)
        for member in range(GROUP):
            at_query = at_head * GROUP + member
            query = tl.load(q + at_query * D + channel, mask=there & (channel < D), other=0.0).to(tl.float32)
            y = read_chunk(query * SCALE, key, e, s, BT, DOT)
            tl.store(scores + at_query * R + rank, y, mask=there & (rank < R))
        s = write_chunk(key, e, s, DOT)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target + at, s, mask=inside)


@triton.jit
def low_rank_values_walk(
    v, projection, values, positions, cu_seqlens, state_src, state_dst, scores, out,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A longer row, one KV head and BD value channels, chunk by chunk."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start == 1:
        return
    rank = tl.arange(0, BR)[None, :]
    value = (tl.program_id(2) * BD + tl.arange(0, BD))[None, :]
    inside = (tl.arange(0, BR) < R)[:, None] & (value < D)
    at = tl.arange(0, BR)[:, None] * D + value
    source = values + (tl.load(state_src + row).to(tl.int64) * H + head) * (R * D)
    target = values + (tl.load(state_dst + row).to(tl.int64) * H + head) * (R * D)
    s = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    for first in range(start, end, BT):
        token = first + tl.arange(0, BT)
        there = (token < end)[:, None]
        at_head = (token.to(tl.int64) * H + head)[:, None]
        position = tl.load(positions + token, mask=token < end, other=0).to(tl.int64)[:, None]
        e = tl.load(projection + position * R + rank, mask=there & (rank < R), other=0.0).to(tl.float32)
        x = tl.load(v + at_head * D + value, mask=there & (value < D), other=0.0).to(tl.float32)
        for member in range(GROUP):
            at_query = at_head * GROUP + member
            p = _softmax(tl.load(scores + at_query * R + rank, mask=there & (rank < R), other=0.0), rank < R)
            y = read_chunk(p, e, x, s, BT, DOT)
            tl.store(out + at_query * D + value, y, mask=there & (value < D))
        s = write_chunk(e, x, s, DOT)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(target + at, s, mask=inside)


def low_rank_attention(call: Call) -> Plan:
    """Head dims and ranks 1 to 256 (in float32 to 128), any number of KV heads and of query heads for each."""
    heads, D = (int(dim) for dim in call.operand("q").shape[1:])
    H, R = int(call.operand("k").shape[1]), int(call.operand("projection").shape[1])
    dtype = call.operand("q").dtype
    exact = dtype == "float32"  # products need three times the registers and memory
    for name, size in (("head dim", D), ("rank", R)):
        require(size in SIZES, f"{name} {size} is not in {SIZES[0]}..{SIZES[-1]}")
        require(not exact or size <= 128, f"{name} {size} is above 128, the most in float32")
    sizes = {"H": H, "GROUP": heads // H, "D": D, "R": R}
    scale = {"SCALE": float(call.attributes["scale"])}

    def launch(kernel: Any, writes: tuple[str, ...], read: tuple[str, int], written: tuple[str, int], longer: bool,
               more: dict[str, Any]) -> Launch:  # fmt: skip
        """`read` and `written` name the block of the state's dimension that is summed over and of the other one."""
        size = written[1]
        part = block(size, 16 if longer and (exact or read[1] > 128) else 32)
        constants = sizes | more | {read[0]: block(read[1], 256), written[0]: part}
        if longer:
            constants |= {"BT": 16 if exact or read[1] > 128 else 32, "DOT": triton_dtype(dtype)}
        rows: Literal["longer", "single"] = "longer" if longer else "single"
        return Launch(kernel, lambda s: (s.B, H, cdiv(size, part)), writes, constants, rows, num_stages=1)

    of_keys, of_values = (("BD", D), ("BR", R)), (("BR", R), ("BD", D))
    return Plan(
        (
            launch(low_rank_scores_walk, ("keys", "scores"), *of_keys, True, scale),
            launch(low_rank_values_walk, ("values", "out"), *of_values, True, {}),
            launch(low_rank_scores_single, ("keys", "scores"), *of_keys, False, scale),
            launch(low_rank_values_single, ("values", "out"), *of_values, False, {}),
        ),
        {"scores": Scratch(lambda s: (s.T, heads, R))},
    )
