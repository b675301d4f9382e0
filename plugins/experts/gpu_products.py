"""Rows times the matrices of an expert, in the Triton language: whole, or quantised and widened in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtrt.plugins.gpu.device import dot


@triton.jit
def multiply(
    rows, has, matrix, scale, expert, row, second, wanted, SIZE: tl.constexpr, TWO: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of SIZE at `rows` [BM, 1] times rows `row` [BN] of a matrix and, if TWO, those `second` further down, in
    float32. SCALES, GROUP and PACKED are a `quantized.Form`; SCALES is None for a matrix that is not quantised."""
    if SCALES == "group":
        product, other = _multiply_groups(
            rows, has, matrix, scale, row, second, wanted, SIZE, TWO, GROUP, PACKED, BM, BN, BK, DTYPE
        )
    else:
        start = matrix + row[None, :] * SIZE
        product, other = _multiply_whole(rows, has, start, start + second * SIZE, wanted, SIZE, TWO, BM, BN, BK, DTYPE)
    if SCALES == "expert":
        by = tl.load(scale + expert).to(tl.float32)
        product *= by
        other *= by
    elif SCALES == "output":
        product *= tl.load(scale + row, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if TWO:
            other *= tl.load(scale + second + row, mask=wanted, other=0.0).to(tl.float32)[None, :]
    return product, other


@triton.jit
def _multiply_whole(
    rows, has, matrix, second, wanted, SIZE: tl.constexpr, TWO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of SIZE at `rows` [BM, 1] times columns at `matrix` [1, BN], and at `second` if TWO."""
    product = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    for i in range(0, SIZE, BK):
        k = i + tl.arange(0, BK)
        a = tl.load(rows + k[None, :], mask=has[:, None] & (k < SIZE)[None, :], other=0.0)
        inner = (k < SIZE)[:, None] & wanted[None, :]
        product = dot(a, tl.load(matrix + k[:, None], mask=inner, other=0.0), product, DTYPE)
        if TWO:
            other = dot(a, tl.load(second + k[:, None], mask=inner, other=0.0), other, DTYPE)
    return product, other


@triton.jit
def _multiply_groups(
    rows, has, matrix, scale, row, second, wanted, SIZE: tl.constexpr, TWO: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The same where GROUP inputs share a scale, by which the sum over them is multiplied. GROUP divides BK, and BK
    SIZE."""
    STEP: tl.constexpr = min(GROUP, 64)  # numbers that are multiplied at once
    PART: tl.constexpr = STEP // 2 if PACKED else STEP  # and their bytes in a row
    GROUPS: tl.constexpr = SIZE // GROUP
    BYTES: tl.constexpr = GROUP // STEP * PART  # of a group in a row
    matrix += row[None, :] * (GROUPS * BYTES)
    scale += row * GROUPS
    product = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    for block in range(0, SIZE // BK):
        for i in tl.static_range(0, BK // STEP):
            group = block * (BK // GROUP) + i * STEP // GROUP
            place = i * PART % BYTES + tl.arange(0, PART)
            a = tl.load(rows + (group * GROUP + place)[None, :], mask=has[:, None], other=0.0)
            high = a
            if PACKED:
                high = tl.load(rows + (group * GROUP + BYTES + place)[None, :], mask=has[:, None], other=0.0)
            at = matrix + (group * BYTES + place)[:, None]
            by = tl.load(scale + group, mask=wanted, other=0.0).to(tl.float32)
            numbers = tl.load(at, mask=wanted[None, :], other=0)
            product += _widened(a, high, numbers, PACKED, BM, BN, DTYPE) * by[None, :]
            if TWO:
                by = tl.load(scale + second * GROUPS + group, mask=wanted, other=0.0).to(tl.float32)
                numbers = tl.load(at + second * (GROUPS * BYTES), mask=wanted[None, :], other=0)
                other += _widened(a, high, numbers, PACKED, BM, BN, DTYPE) * by[None, :]
    return product, other


@triton.jit
def _widened(a, high, numbers, PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr):
    """a times whole numbers of 8 bits, or a and `high` times the low and high halves of bytes."""
    zeros = tl.zeros((BM, BN), tl.float32)
    if PACKED:
        return dot(high, numbers >> 4, dot(a, (numbers << 4) >> 4, zeros, DTYPE), DTYPE)
    else:
        return dot(a, numbers, zeros, DTYPE)
