"""What a chunk of a longer row needs before the state is known, for the walk over the chunks.

scores [T, H, BT]: of token i of a chunk for token j <= i, the product of q_i and k_j with their decay;
from_start, to_end [T, H]: what scales q and k of a token for the state: norm, scale, and the decays from the chunk's
start to the token and from there to the chunk's end. With a decay in each channel, q_decayed and k_decayed [T, H, K]:
q and k with all that in;
decay [tiles, H] or [tiles, H, K]: that of the whole chunk;
w [T, H, K], u [T, H, V], delta rule: the chunk's corrected values are u - w S, S being the state at its start;
coupling [T, H, BT], between two launches: the products of k_i and k_j, j < i, with their decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import decay_sums, dot, sigmoid, softplus, tile
from hybridtrt.plugins.gpu.triangular import unit_lower_inverse


@triton.jit
def log_decay(gate, bias, rate, valid, BOUND: tl.constexpr):
    """g of the gate at these addresses, by the formulas of reference.py; no sense where it is not valid."""
    a = tl.load(gate, mask=valid, other=0.0).to(tl.float32) + bias
    if BOUND is None:
        return -rate * softplus(a)
    else:
        return BOUND * sigmoid(rate * a)


@triton.jit
def _channel_decay(gate, dt_bias, rate, at, head, channel, valid, K: tl.constexpr, BOUND: tl.constexpr):
    """g of some tokens and channels of a head; 0 where they are not valid."""
    bias = tl.load(dt_bias + head * K + channel, mask=channel < K, other=0.0).to(tl.float32)
    g = log_decay(gate + at, bias[None, :], rate, valid, BOUND)
    return tl.where(valid, g, 0.0)


@triton.jit
def _part(x, at, c, N: tl.constexpr, BN: tl.constexpr, valid):
    """BN channels of x [..., N], from c on, of the tokens (or tokens' heads) `at`."""
    channel = c + tl.arange(0, BN)
    return tl.load(x + at[:, None] * N + channel[None, :], mask=valid[:, None] & (channel < N)[None, :], other=0.0)


@triton.jit
def _factors(q, k, at, valid, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr,
             L2_NORM: tl.constexpr):  # fmt: skip
    """What norm and scale make of the tokens of q and k."""
    q_factor = tl.full((BT,), SCALE, tl.float32)
    k_factor = tl.full((BT,), 1.0, tl.float32)
    if L2_NORM:
        q_square = tl.zeros((BT,), tl.float32)
        k_square = tl.zeros((BT,), tl.float32)
        for c in range(0, K, BK):
            query = _part(q, at, c, K, BK, valid).to(tl.float32)
            key = _part(k, at, c, K, BK, valid).to(tl.float32)
            q_square += tl.sum(query * query, axis=1)
            k_square += tl.sum(key * key, axis=1)
        q_factor *= tl.rsqrt(q_square + 1e-6)
        k_factor *= tl.rsqrt(k_square + 1e-6)
    return q_factor, k_factor


@triton.jit
def _solve(inverse, x, solved, at_x, at, valid, N: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    """The inverse times x, from tokens `at_x` to tokens `at`, BN of N channels at a time; both may be one memory."""
    for c in range(0, N, BN):
        channel = c + tl.arange(0, BN)
        y = dot(inverse, _part(x, at_x, c, N, BN, valid), tl.zeros((BT, BN), tl.float32), DOT)
        tl.debug_barrier()
        tl.store(solved + at[:, None] * N + channel[None, :], y, mask=valid[:, None] & (channel < N)[None, :])


@triton.jit
def linear_attention_chunk(
    q, k, v, gate_1, gate_2, A_log, dt_bias, cu_seqlens, B, from_start, to_end, decay, scores, w, u,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DELTA: tl.constexpr, L2_NORM: tl.constexpr, SCALE: tl.constexpr, BOUND: tl.constexpr, BETA_SCALE: tl.constexpr,
    FEW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One chunk of a longer row and one head, with one decay a token or none."""
    number = tl.program_id(0)
    _, start, first, end = tile(cu_seqlens, B, number, BT)
    if (first >= end) | (end - start <= FEW):
        return
    head = tl.program_id(1)
    i = tl.arange(0, BT)
    token = first + i
    valid = token < end
    at = token.to(tl.int64) * H + head
    at_key = token.to(tl.int64) * (H // GROUP) + head // GROUP
    q_factor, k_factor = _factors(q, k, at_key, valid, K, BT, BK, SCALE, L2_NORM)
    of_q = tl.zeros((BT, BT), tl.float32)
    of_k = tl.zeros((BT, BT), tl.float32)
    for c in range(0, K, BK):
        query = _part(q, at_key, c, K, BK, valid)
        key = _part(k, at_key, c, K, BK, valid)
        of_q = dot(query, tl.trans(key), of_q, DOT)
        if DELTA:
            of_k = dot(key, tl.trans(key), of_k, DOT)
    between = k_factor[None, :]
    started = tl.full((BT,), 1.0, tl.float32)
    ended = k_factor
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        if dt_bias is None:
            g = tl.where(valid, -rate, 0.0)
        else:
            bias = tl.load(dt_bias + head).to(tl.float32)
            g = tl.where(valid, log_decay(gate_1 + at, bias, rate, valid, BOUND), 0.0)
        coarse, fine, all_coarse, all_fine = decay_sums(g)
        passed = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        between = between * tl.exp(tl.minimum(passed, 0.0))
        started = tl.exp(coarse + fine)
        ended = ended * tl.exp((all_coarse - coarse) + (all_fine - fine))
        tl.store(decay + number.to(tl.int64) * H + head, tl.exp(all_coarse + all_fine))
    tl.store(from_start + at, q_factor * started, mask=valid)
    tl.store(to_end + at, ended, mask=valid)
    of_q = tl.where(i[:, None] >= i[None, :], of_q * between, 0.0) * q_factor[:, None]
    tl.store(scores + at[:, None] * BT + i[None, :], of_q, mask=valid[:, None])
    if DELTA:
        b = tl.load((gate_1 if dt_bias is None else gate_2) + at, mask=valid, other=0.0).to(tl.float32)
        beta = BETA_SCALE * sigmoid(b)
        of_k = tl.where(i[:, None] > i[None, :], of_k * between, 0.0) * (beta * k_factor)[:, None]
        inverse = unit_lower_inverse(of_k, BT, DOT) * beta[None, :]
        _solve(inverse, v, u, at, at, valid, V, BV, BT, DOT)
        _solve(inverse * (k_factor * started)[None, :], k, w, at_key, at, valid, K, BK, BT, DOT)


@triton.jit
def linear_attention_channel_chunk(
    q, k, gate_1, A_log, dt_bias, cu_seqlens, B, q_decayed, k_decayed, decay, scores, w, coupling,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    DELTA: tl.constexpr, L2_NORM: tl.constexpr, SCALE: tl.constexpr, BOUND: tl.constexpr,
    FEW: tl.constexpr, BT: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One chunk of a longer row and one head, with a decay of its own in each key channel.

    The decays go into the operands of the products, split at a token between the two so that no exponent is positive:
    for blocks of 1, 2, 4, ... tokens, the products of each second block with the one before it, split where that ends.
    So i and j belong to blocks of 2^n tokens if n is the highest bit in which they differ.
    """
    number = tl.program_id(0)
    _, start, first, end = tile(cu_seqlens, B, number, BT)
    if (first >= end) | (end - start <= FEW):
        return
    head = tl.program_id(1)
    i = tl.arange(0, BT)
    differing = i[:, None] ^ i[None, :]
    token = first + i
    valid = token < end
    at = token.to(tl.int64) * H + head
    at_key = token.to(tl.int64) * (H // GROUP) + head // GROUP
    q_factor, k_factor = _factors(q, k, at_key, valid, K, BT, BK, SCALE, L2_NORM)
    of_q = tl.zeros((BT, BT), tl.float32)
    of_k = tl.zeros((BT, BT), tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    of_same = tl.zeros((BT,), tl.float32)
    for c in range(0, K, BK):
        channel = c + tl.arange(0, BK)
        mask = valid[:, None] & (channel < K)[None, :]
        at_channel = at[:, None] * K + channel[None, :]
        query = _part(q, at_key, c, K, BK, valid).to(tl.float32) * q_factor[:, None]
        key = _part(k, at_key, c, K, BK, valid).to(tl.float32) * k_factor[:, None]
        of_same += tl.sum(query * key, axis=1)
        g = _channel_decay(gate_1, dt_bias, rate, at_channel, head, channel, mask, K, BOUND)
        coarse, fine, all_coarse, all_fine = decay_sums(g)
        for level in range(LEVELS):
            border = ((((i >> level) | 1) << level) - 1)[:, None] + tl.zeros((BT, BK), tl.int32)
            passed = (coarse - tl.gather(coarse, border, 0)) + (fine - tl.gather(fine, border, 0))
            factor = tl.exp(-tl.abs(passed))
            faded = key * factor
            here = (differing >> level) == 1
            none = tl.zeros((BT, BT), tl.float32)
            of_q += tl.where(here, dot(query * factor, tl.trans(faded), none, DOT), 0.0)
            if DELTA:
                of_k += tl.where(here, dot(faded, tl.trans(faded), none, DOT), 0.0)
        started = tl.exp(coarse + fine)
        ended = (all_coarse[None, :] - coarse) + (all_fine[None, :] - fine)
        tl.store(q_decayed + at_channel, query * started, mask=mask)
        if DELTA:
            tl.store(w + at_channel, key * started, mask=mask)
        tl.store(k_decayed + at_channel, key * tl.exp(ended), mask=mask)
        at_decay = (number.to(tl.int64) * H + head) * K + channel
        tl.store(decay + at_decay, tl.exp(all_coarse + all_fine), mask=channel < K)
    of_q = tl.where(i[:, None] > i[None, :], of_q, tl.where(i[:, None] == i[None, :], of_same[:, None], 0.0))
    tl.store(scores + at[:, None] * BT + i[None, :], of_q, mask=valid[:, None])
    if DELTA:
        of_k = tl.where(i[:, None] > i[None, :], of_k, 0.0)
        tl.store(coupling + at[:, None] * BT + i[None, :], of_k, mask=valid[:, None])


@triton.jit
def linear_attention_channel_solve(
    v, gate_2, w, coupling, cu_seqlens, B, u,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BETA_SCALE: tl.constexpr,
    FEW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The delta rule of one chunk of a longer row and one head; w has k decayed from the chunk's start before."""
    _, start, first, end = tile(cu_seqlens, B, tl.program_id(0), BT)
    if (first >= end) | (end - start <= FEW):
        return
    head = tl.program_id(1)
    i = tl.arange(0, BT)
    token = first + i
    valid = token < end
    at = token.to(tl.int64) * H + head
    b = tl.load(gate_2 + at, mask=valid, other=0.0).to(tl.float32)
    beta = BETA_SCALE * sigmoid(b)
    of_k = tl.load(coupling + at[:, None] * BT + i[None, :], mask=valid[:, None], other=0.0)
    inverse = unit_lower_inverse(of_k * beta[:, None], BT, DOT) * beta[None, :]
    _solve(inverse, v, u, at, at, valid, V, BV, BT, DOT)
    _solve(inverse, w, w, at, at, valid, K, BK, BT, DOT)
