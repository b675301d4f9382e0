"""Rows of one token in one launch, a program for each row, head and block of value channels. Where the step has
token_slots, this launch takes all rows that may have some, token by token with the state in registers.

Longer rows in chunks of 64 tokens, in float32 of 32. First all that does not depend on the state, for all chunks at
once, a program for each chunk and head (gpu_chunk.py): one launch, or two where the delta rule has a decay in each
channel. Then a walk over the chunks of a row (gpu_walk.py). The chunked form is that of arXiv 2412.06464, with a decay
in each channel that of arXiv 2510.26692; the formulas are those of plugins/chunked.py. Blocks are sized so that nothing
spills in 16 bits: tests/gpu_calls.py has the budgets.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.device import sigmoid
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, Sizes, block, cdiv, power_of_2, tiles
from hybridtrt.plugins.gpu.types import triton_dtype
from hybridtrt.plugins.linear_attention.gpu_chunk import (
    linear_attention_channel_chunk,
    linear_attention_channel_solve,
    linear_attention_chunk,
    log_decay,
)
from hybridtrt.plugins.linear_attention.gpu_walk import linear_attention_walk
from hybridtrt.plugins.spec import require
from hybridtrt.plugins.step import MOST_TOKEN_SLOTS

HEAD_DIMS = range(1, 257)


@triton.jit
def _token(
    q, k, v, gate_1, gate_2, A_log, dt_bias, out, s, token, head, channel, value,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, L2_NORM: tl.constexpr, SCALE: tl.constexpr,
    BOUND: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """The state s [channels, values] of a head after one token more, whose output is stored."""
    at_head = tl.cast(token, tl.int64) * H + head
    at_key = (tl.cast(token, tl.int64) * (H // GROUP) + head // GROUP) * K + channel
    key = tl.load(k + at_key, mask=channel < K, other=0.0).to(tl.float32)
    query = tl.load(q + at_key, mask=channel < K, other=0.0).to(tl.float32)
    u = tl.load(v + at_head * V + value, mask=value < V, other=0.0).to(tl.float32)
    if L2_NORM:
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
    query *= SCALE
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        if dt_bias is None:
            s *= tl.exp(-rate)
        elif CHANNELS:
            bias = tl.load(dt_bias + head * K + channel, mask=channel < K, other=0.0).to(tl.float32)
            s *= tl.exp(log_decay(gate_1 + at_head * K + channel, bias, rate, channel < K, BOUND))[:, None]
        else:
            bias = tl.load(dt_bias + head).to(tl.float32)
            s *= tl.exp(log_decay(gate_1 + at_head, bias, rate, True, BOUND))
    if DELTA:
        b = tl.load((gate_1 if dt_bias is None else gate_2) + at_head).to(tl.float32)
        u = BETA_SCALE * sigmoid(b) * (u - tl.sum(key[:, None] * s, axis=0))
    y = tl.sum(query[:, None] * s, axis=0) + tl.sum(query * key, axis=0) * u
    tl.store(out + at_head * V + value, y, mask=value < V)
    return s + key[:, None] * u[None, :]


@triton.jit
def linear_attention_single(
    q, k, v, gate_1, gate_2, A_log, dt_bias, state, cu_seqlens, state_src, state_dst, token_slots, out,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, L2_NORM: tl.constexpr, SCALE: tl.constexpr,
    BOUND: tl.constexpr, BETA_SCALE: tl.constexpr, FEW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One head and BV value channels of a row of one token, or of up to FEW with token_slots.

    GROUP heads have one key head.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if (end - start > FEW) | (end == start):
        return
    channel = tl.arange(0, BK)
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (channel < K)[:, None] & (value < V)[None, :]
    at = (head * K + channel[:, None]) * V + value[None, :]
    source = tl.load(state_src + row).to(tl.int64) * (H * K * V)
    target = tl.load(state_dst + row).to(tl.int64) * (H * K * V)
    s = tl.load(state + source + at, mask=inside, other=0.0).to(tl.float32)
    if token_slots is None:
        s = _token(q, k, v, gate_1, gate_2, A_log, dt_bias, out, s, start, head, channel, value,
                   H, GROUP, K, V, DELTA, CHANNELS, L2_NORM, SCALE, BOUND, BETA_SCALE)  # fmt: skip
    else:
        tl.debug_barrier()  # source and a token's slot may be one
        for token in range(start, end):
            s = _token(q, k, v, gate_1, gate_2, A_log, dt_bias, out, s, token, head, channel, value,
                       H, GROUP, K, V, DELTA, CHANNELS, L2_NORM, SCALE, BOUND, BETA_SCALE)  # fmt: skip
            slot = tl.load(token_slots + token).to(tl.int64)
            tl.store(state + slot * (H * K * V) + at, s, mask=inside & (slot != 0))
    tl.debug_barrier()  # source and target may be one slot
    tl.store(state + target + at, s, mask=inside)


def linear_attention(call: Call) -> Plan:
    """Every rule, with any number of heads of 1 to 256 key and value channels."""
    key_heads, K = (int(dim) for dim in call.operand("k").shape[1:])
    H, V = (int(dim) for dim in call.operand("v").shape[1:])
    for name, size in (("key", K), ("value", V)):
        require(size in HEAD_DIMS, f"{name} head dim {size} is not in {HEAD_DIMS[0]}..{HEAD_DIMS[-1]}")
    dtype, attributes = call.operand("q").dtype, call.attributes
    delta, decays = "delta" in attributes["rule"], call.has("A_log")
    channels = call.has("dt_bias") and len(call.operand("dt_bias").shape) == 2
    few = MOST_TOKEN_SLOTS if call.has("token_slots") else 1
    # A row of more tokens than that brings at least as many more tokens than rows.
    longer: dict[str, Any] = {"rows": "longer", "when": None if few == 1 else lambda s: s.B + few <= s.T}
    bt = 32 if dtype == "float32" else 64
    heads = {"H": H, "GROUP": H // key_heads}
    dims = {"K": K, "V": V}
    gate = {
        "L2_NORM": attributes.get("l2_norm", False),
        "SCALE": float(attributes["scale"]),
        "BOUND": attributes.get("decay_bound"),
    }
    beta = {"BETA_SCALE": float(attributes.get("beta_scale", 1.0))}
    delta_rule = {"DELTA": delta}
    chunk = {"FEW": few, "BT": bt, "DOT": triton_dtype(dtype)}
    wide = K > 128
    most = 32 if wide or K % 64 or V % 64 or dtype == "float32" else 64
    part, value_part = block(K, most), block(V, most)

    def chunks(s: Sizes) -> tuple[Any, ...]:
        return (tiles(s, bt), H)

    prepare: tuple[Launch, ...]
    scratch = {"scores": Scratch(lambda s: (s.T, H, bt), dtype)}
    if delta:
        scratch |= {"w": Scratch(lambda s: (s.T, H, K), dtype), "u": Scratch(lambda s: (s.T, H, V), dtype)}
    if channels:
        scratch |= {name: Scratch(lambda s: (s.T, H, K), dtype) for name in ("q_decayed", "k_decayed")}
        scratch["decay"] = Scratch(lambda s: (tiles(s, bt), H, K))
        prepare = (
            Launch(
                linear_attention_channel_chunk,
                chunks,
                ("q_decayed", "k_decayed", "decay", "scores", *(("w", "coupling") if delta else ())),
                {"K": K, "LEVELS": bt.bit_length() - 1, "BK": block(K, 16)} | heads | gate | delta_rule | chunk,
                num_warps=8,
                **longer,
            ),
        )
        if delta:
            scratch["coupling"] = Scratch(lambda s: (s.T, H, bt))
            solve = Launch(
                linear_attention_channel_solve,
                chunks,
                ("w", "u"),
                {"H": H, "BK": part, "BV": value_part} | dims | beta | chunk,
                **longer,
            )
            prepare = (*prepare, solve)
    else:
        scratch |= {name: Scratch(lambda s: (s.T, H)) for name in ("from_start", "to_end")}
        if decays:
            scratch["decay"] = Scratch(lambda s: (tiles(s, bt), H))
        written = ("from_start", "to_end", *(("decay",) if decays else ()), "scores", *(("w", "u") if delta else ()))
        constants = {"BK": part, "BV": value_part} | heads | dims | gate | beta | delta_rule | chunk
        stages = 1 if wide else 2
        prepare = (Launch(linear_attention_chunk, chunks, written, constants, num_stages=stages, **longer),)
    bv = block(V, 16 if wide or dtype == "float32" else 32)
    walk = Launch(
        linear_attention_walk,
        lambda s: (s.B, H, cdiv(V, bv)),
        ("out", "state"),
        {"DECAYS": decays, "CHANNELS": channels, "BK": block(K, 64), "BV": bv} | heads | dims | delta_rule | chunk,
        num_stages=1 if wide else 2,
        **longer,
    )
    bn = block(V, 32)
    single = Launch(
        linear_attention_single,
        lambda s: (s.B, H, cdiv(V, bn)),
        ("out", "state"),
        {"CHANNELS": channels, "FEW": few, "BK": power_of_2(K), "BV": bn} | heads | dims | gate | beta | delta_rule,
        rows="single" if few == 1 else "all",
    )
    return Plan((*prepare, walk, single), scratch)
