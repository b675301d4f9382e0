"""The gates of all tokens in tiles, whatever rows they are of, as products with the blocks of the gates' weights.

Then a program for each row and block of channels: one step for a row of one token, scans of chunks for longer rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.device import dot, dot_float32, sigmoid, softplus
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, block, cdiv, power_of_2
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.rg_lru.reference import SHARPNESS


@triton.jit
def _one_minus_exp(y):
    """1 - exp(y) for y <= 0; by its series, to y^8, where the difference would lose digits."""
    series = 1.0 + y * (1 / 6) * (1.0 + y * (1 / 7) * (1.0 + y * (1 / 8)))
    series = 1.0 + y * (1 / 2) * (1.0 + y * (1 / 3) * (1.0 + y * (1 / 4) * (1.0 + y * (1 / 5) * series)))
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def rg_lru_gates(
    x, input_gate, input_bias, recurrence_gate, recurrence_bias, decay, positions, T, a, added,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SHARPNESS: tl.constexpr,
    BT: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """a_t and what token t adds to the state, [T, channels] both: BT tokens and BO channels of a head.

    WIDE: weights in float32 are not rounded to the 16 bits of x.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    output = tl.program_id(2) * BO + tl.arange(0, BO)
    at = token.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH
    of_input = tl.zeros((BT, BO), tl.float32)
    of_recurrence = tl.zeros((BT, BO), tl.float32)
    for i in range(0, WIDTH, BI):
        inner = i + tl.arange(0, BI)
        tokens = (token < T)[:, None] & (inner < WIDTH)[None, :]
        part = tl.load(x + at + inner[None, :], mask=tokens, other=0.0)
        at_weight = (head * WIDTH + inner[:, None]) * WIDTH + output[None, :]
        inside = (inner < WIDTH)[:, None] & (output < WIDTH)[None, :]
        to_input = tl.load(input_gate + at_weight, mask=inside, other=0.0)
        to_recurrence = tl.load(recurrence_gate + at_weight, mask=inside, other=0.0)
        if WIDE:
            of_input += dot_float32(part.to(tl.float32), to_input.to(tl.float32), DOT)
            of_recurrence += dot_float32(part.to(tl.float32), to_recurrence.to(tl.float32), DOT)
        else:
            of_input = dot(part, to_input, of_input, DOT)
            of_recurrence = dot(part, to_recurrence, of_recurrence, DOT)
    channel = head * WIDTH + output
    there = output < WIDTH
    of_input += tl.load(input_bias + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    of_recurrence += tl.load(recurrence_bias + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    rate = softplus(tl.load(decay + channel, mask=there, other=0.0).to(tl.float32))
    log_a = -SHARPNESS * sigmoid(of_recurrence) * rate[None, :]
    first = tl.load(positions + token, mask=token < T, other=0) == 0
    scale = tl.where(first[:, None], 1.0, tl.sqrt(_one_minus_exp(2.0 * log_a)))
    valid = (token < T)[:, None] & there[None, :]
    value = tl.load(x + at + output[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(a + at + output[None, :], tl.exp(log_a), mask=valid)
    tl.store(added + at + output[None, :], scale * sigmoid(of_input) * value, mask=valid)


@triton.jit
def rg_lru_single(a, added, state, cu_seqlens, state_src, state_dst, out, C: tl.constexpr, BC: tl.constexpr):
    """A row of one token, BC channels."""
    row = tl.program_id(0)
    token = tl.load(cu_seqlens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    valid = channel < C
    source = tl.load(state_src + row).to(tl.int64)
    target = tl.load(state_dst + row).to(tl.int64)
    at = token.to(tl.int64) * C + channel
    h = tl.load(state + source * C + channel, mask=valid, other=0.0).to(tl.float32)
    h = tl.load(a + at, mask=valid, other=0.0) * h + tl.load(added + at, mask=valid, other=0.0)
    tl.store(out + at, h, mask=valid)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target * C + channel, h, mask=valid)


@triton.jit
def _then(first_decay, first, second_decay, second):
    """Two steps of the recurrence as one."""
    return first_decay * second_decay, second_decay * first + second


@triton.jit
def rg_lru_walk(
    a, added, state, cu_seqlens, state_src, state_dst, out,
    C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A longer row, BC channels: scans of BT tokens from zero, to which the decayed state before them is added."""
    row = tl.program_id(0)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end - start == 1:
        return
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    source = tl.load(state_src + row).to(tl.int64)
    target = tl.load(state_dst + row).to(tl.int64)
    h = tl.load(state + source * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    i = tl.arange(0, BT)
    for first in range(start, end, BT):
        valid = (first + i < end)[:, None] & (channel < C)[None, :]
        at = (first + i).to(tl.int64)[:, None] * C + channel[None, :]
        decays = tl.load(a + at, mask=valid, other=1.0)  # tokens past the end keep the state
        values = tl.load(added + at, mask=valid, other=0.0)
        decays, values = tl.associative_scan((decays, values), 0, _then)
        values += decays * h[None, :]
        tl.store(out + at, values, mask=valid)
        h = tl.sum(tl.where((i == BT - 1)[:, None], values, 0.0), axis=0)
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target * C + channel, h, mask=channel < C)


def rg_lru(call: Call) -> Plan:
    """Any number of heads of any width."""
    heads, width = (int(dim) for dim in call.operand("input_gate").shape[:2])
    C, dtype = heads * width, call.operand("x").dtype
    bt, bo, bc = 32, block(width, 32), min(128, power_of_2(C))
    gates = Launch(
        rg_lru_gates,
        lambda s: (cdiv(s.T, bt), heads, cdiv(width, bo)),
        ("a", "added"),
        {
            "HEADS": heads,
            "WIDTH": width,
            "SHARPNESS": SHARPNESS,
            "BT": bt,
            "BO": bo,
            "BI": block(width, 32 if dtype == "float32" else 64),
            "DOT": triton_dtype(dtype),
            "WIDE": call.operand("input_gate").dtype == "float32",
        },
    )
    bw = min(32, power_of_2(C))
    walk = Launch(
        rg_lru_walk,
        lambda s: (s.B, cdiv(C, bw)),
        ("out", "state"),
        {"C": C, "BT": 64, "BC": bw},
        rows="longer",
    )
    single = Launch(rg_lru_single, lambda s: (s.B, cdiv(C, bc)), ("out", "state"), {"C": C, "BC": bc}, rows="single")
    return Plan((gates, walk, single), {name: Scratch(lambda s: (s.T, C)) for name in ("a", "added")})
