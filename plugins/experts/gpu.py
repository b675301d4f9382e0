"""Pairs of token and expert in tiles of one expert's pairs: up, then down, then each token's weighted sum.

A step of few pairs needs no dispatch: each pair looks which others have its expert, and every sixteenth pair of an
expert leads a tile. Otherwise three launches count the pairs of each expert in blocks, add up, and put the pairs in
order. Which tiles there are is known on the device only, so there are programs for the most that there can be.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.experts import intermediate_size
from hybridtrt.plugins.experts.gpu_products import multiply
from hybridtrt.plugins.experts.quantized import form_of
from hybridtrt.plugins.gpu.activations import activate, glu
from hybridtrt.plugins.gpu.dispatch import dispatch, few_pairs, tile_pairs
from hybridtrt.plugins.gpu.plan import Launch, Plan, Scratch, Sizes, cdiv, power_of_2, smaller
from hybridtrt.plugins.gpu.types import triton_dtype

FEW = 256  # pairs of a step without dispatch
ROWS = 64  # pairs of a tile of the others
GROUPS = (32, 64, 128)  # inputs that may share a scale


@triton.jit
def _up(
    x, up, up_bias, up_scale, hidden, expert, pairs, has, column,
    TOP_K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """hidden[pair] = act(up x + bias) at some columns, for pairs of one expert."""
    wanted = column < INNER
    row = expert.to(tl.int64) * (2 * INNER if GATED else INNER) + column
    rows = x + (pairs // TOP_K).to(tl.int64)[:, None] * H
    first, second = multiply(rows, has, up, up_scale, expert, row, INNER, wanted, H, GATED,
                             SCALES, GROUP, PACKED, BM, BN, BK, DTYPE)  # fmt: skip
    if up_bias is not None:
        first += tl.load(up_bias + row, mask=wanted, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if up_bias is not None:
            second += tl.load(up_bias + INNER + row, mask=wanted, other=0.0).to(tl.float32)[None, :]
        first = glu(first, second, ACTIVATION, CLAMP)
    else:
        first = activate(first, ACTIVATION)
    at = pairs.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(hidden + at, first, mask=has[:, None] & wanted[None, :])


@triton.jit
def _down(
    hidden, down, down_bias, down_scale, products, expert, pairs, has, column, H: tl.constexpr, INNER: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """products[pair] = down hidden + bias at some columns, for pairs of one expert."""
    wanted = column < H
    row = expert.to(tl.int64) * H + column
    rows = hidden + pairs.to(tl.int64)[:, None] * INNER
    product, _ = multiply(rows, has, down, down_scale, expert, row, 0, wanted, INNER, False,
                          SCALES, GROUP, PACKED, BM, BN, BK, DTYPE)  # fmt: skip
    if down_bias is not None:
        product += tl.load(down_bias + row, mask=wanted, other=0.0).to(tl.float32)[None, :]
    at = pairs.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(products + at, product, mask=has[:, None] & wanted[None, :])


@triton.jit
def experts_up_few(
    x, experts, up, up_bias, up_scale, T, hidden,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """In a step of at most MOST tokens: BN columns of a tile that its pair leads."""
    if T > MOST:
        return
    expert, pairs, has, leads = few_pairs(experts, T * TOP_K, tl.program_id(0), EXPERTS, BP, BM)
    if not leads:
        return
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    _up(x, up, up_bias, up_scale, hidden, expert, pairs, has, column, TOP_K, H, INNER, ACTIVATION, GATED, CLAMP,
        SCALES, GROUP, PACKED, BM, BN, BK, DTYPE)  # fmt: skip


@triton.jit
def experts_down_few(
    experts, hidden, down, down_bias, down_scale, T, products,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The same for the products."""
    if T > MOST:
        return
    expert, pairs, has, leads = few_pairs(experts, T * TOP_K, tl.program_id(0), EXPERTS, BP, BM)
    if not leads:
        return
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    _down(hidden, down, down_bias, down_scale, products, expert, pairs, has, column, H, INNER,
          SCALES, GROUP, PACKED, BM, BN, BK, DTYPE)  # fmt: skip


@triton.jit
def experts_up(
    x, up, up_bias, up_scale, order, table, T, hidden,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """In a step of more tokens: BN columns of a tile of ordered pairs."""
    if T <= MOST:
        return
    expert, pairs, has = tile_pairs(order, table, tl.program_id(1), EXPERTS, BE, BM)
    if expert >= EXPERTS:
        return
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    _up(x, up, up_bias, up_scale, hidden, expert, pairs, has, column, TOP_K, H, INNER, ACTIVATION, GATED, CLAMP,
        SCALES, GROUP, PACKED, BM, BN, BK, DTYPE)  # fmt: skip


@triton.jit
def experts_down(
    hidden, down, down_bias, down_scale, order, table, T, products,
    MOST: tl.constexpr, EXPERTS: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The same for the products."""
    if T <= MOST:
        return
    expert, pairs, has = tile_pairs(order, table, tl.program_id(1), EXPERTS, BE, BM)
    if expert >= EXPERTS:
        return
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    _down(hidden, down, down_bias, down_scale, products, expert, pairs, has, column, H, INNER,
          SCALES, GROUP, PACKED, BM, BN, BK, DTYPE)  # fmt: skip


@triton.jit
def experts_sum(
    weights, experts, products, out,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """BH numbers of a token: the weighted sum over its experts, in their order; pairs without an expert are nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for first in range(0, TOP_K, BK):
        j = first + tl.arange(0, BK)
        number = tl.load(experts + token * TOP_K + j, mask=j < TOP_K, other=EXPERTS)
        runs = number < EXPERTS
        weight = tl.load(weights + token * TOP_K + j, mask=runs, other=0.0).to(tl.float32)
        at = (token * TOP_K + j)[:, None] * H + column[None, :]
        product = tl.load(products + at, mask=runs[:, None] & (column < H)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(product * weight[:, None], axis=0)
    tl.store(out + token * H + column, total, mask=column < H)


def _matrix(call: Call, role: str, width: int, whole: int, grouped: int) -> dict[str, Any]:
    """Constants of a matrix of `width` inputs: its form, and the inputs that are read at once.

    These are `whole`, or where groups share a scale, as many groups as `grouped` inputs are, but at least one.
    """
    operands = {operand.name: operand.spec for operand in call.of("weight")}
    if f"{role}_scale" not in operands:
        return {"SCALES": None, "GROUP": 0, "PACKED": False, "BK": whole}
    form = form_of(role, operands[role], operands[f"{role}_scale"], width)
    if form.group and form.group not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        raise ValueError(f"{role}_scale has a scale for {form.group} inputs, expected one of {known}, or for all")
    inputs = max(form.group, min(grouped, width & -width)) if form.group else whole
    return {"SCALES": form.scales, "GROUP": form.group, "PACKED": form.packed, "BK": inputs}


def _columns(matrix: dict[str, Any], most: int) -> int:
    """Columns of a tile of ROWS pairs: with groups half as many, for their sums are in registers, too."""
    return most // 2 if matrix["GROUP"] else most


def experts(call: Call) -> Plan:
    """Any number of experts and choices, any activation, gated or not; matrices in the forms of `quantized.Form`."""
    gated, clamp = call.attributes.get("gated", True), call.attributes.get("clamp")
    count, width, _ = (int(size) for size in call.operand("down").shape)
    inner = intermediate_size(call.operand("up"), gated)
    top_k, dtype = int(call.operand("experts").shape[1]), call.operand("x").dtype
    most = FEW // top_k
    part = 2 if dtype == "float32" else 1
    sizes = {"EXPERTS": count, "H": width, "INNER": inner, "MOST": most, "DTYPE": triton_dtype(dtype)}
    function = {"TOP_K": top_k, "ACTIVATION": call.attributes["activation"], "GATED": gated, "CLAMP": clamp}

    def few(s: Sizes) -> bool:
        return bool(most >= s.T)

    def many(s: Sizes) -> bool:
        return bool(most < s.T)

    def most_tiles(s: Sizes) -> Any:
        """A tile has at least one pair, and an expert at most one tile that is not full."""
        return smaller(s.T * top_k, s.T * top_k // ROWS + count)

    up, down = (_matrix(call, *one, 128 // part, 128) for one in (("up", width), ("down", inner)))
    tile = {"BP": power_of_2(most * top_k), "BM": 16, "BN": 32, "TOP_K": top_k}
    options: dict[str, Any] = {"num_stages": 4, "when": few}
    few_launches = (
        Launch(
            experts_up_few,
            lambda s: (smaller(s.T, most) * top_k, cdiv(inner, 32)),
            ("hidden",),
            sizes | function | tile | up,
            **options,
        ),
        Launch(
            experts_down_few,
            lambda s: (smaller(s.T, most) * top_k, cdiv(width, 32)),
            ("products",),
            sizes | tile | down,
            **options,
        ),
    )
    ordered, scratch = dispatch(count, top_k, ROWS, most)
    up, down = (_matrix(call, *one, 64 // part, 0) for one in (("up", width), ("down", inner)))
    up_columns, down_columns = (32, 32) if part == 2 else (_columns(up, 64 if gated else 128), _columns(down, 128))
    tile = {"BE": power_of_2(count), "BM": ROWS}
    options = {"num_stages": 3, "when": many}
    many_launches = (
        *ordered,
        Launch(
            experts_up,
            lambda s: (cdiv(inner, up_columns), most_tiles(s)),
            ("hidden",),
            sizes | function | tile | up | {"BN": up_columns},
            num_warps=8 if up["GROUP"] and not gated else 4,
            **options,
        ),
        Launch(
            experts_down,
            lambda s: (cdiv(width, down_columns), most_tiles(s)),
            ("products",),
            sizes | tile | down | {"BN": down_columns},
            num_warps=8 if down["GROUP"] else 4,
            **options,
        ),
    )
    add = Launch(
        experts_sum,
        lambda s: (s.T, cdiv(width, 256)),
        ("out",),
        {"EXPERTS": count, "TOP_K": top_k, "H": width, "BK": min(16, power_of_2(top_k)), "BH": 256},
    )
    scratch |= {
        "hidden": Scratch(lambda s: (s.T * top_k, inner), dtype),
        "products": Scratch(lambda s: (s.T * top_k, width), dtype),
    }
    return Plan((*(few_launches if most else ()), *many_launches, add), scratch)
