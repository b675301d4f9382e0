"""A program for each token. Few experts are found one after another; where many are ranked, all are sorted.

Among equals the expert of the lower number comes first; NaN counts as the largest. Sums over the chosen go in their
order, so that what is ranked beyond them changes no bit of theirs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.device import sigmoid
from hybridtrt.plugins.gpu.plan import Launch, Plan, power_of_2

SORTED_FROM = 24  # so many are sooner found by sorting all


@triton.jit
def _largest(x, left, number, BE: tl.constexpr):
    """The largest x of those left and its number."""
    most = tl.max(tl.where(left, x, -float("inf")))
    return most, tl.min(tl.where(left & (x == most), number, BE))


@triton.jit
def _best(preference, valid, number, COUNT: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr):
    """Numbers of the COUNT best, in order."""
    slot = tl.arange(0, BR)
    chosen = tl.zeros((BR,), tl.int32)
    left = valid
    for place in range(COUNT):
        _, expert = _largest(preference, left, number, BE)
        left = left & (number != expert)
        chosen = tl.where(slot == place, expert, chosen)
    return chosen


@triton.jit
def _sorted(preference, valid, number, BE: tl.constexpr):
    """All numbers, best first. The keys are the order of the floating point numbers as integers, then the numbers."""
    bits = (preference + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(valid, ordered, -0x80000000)
    keys = ordered.to(tl.int64) * 4294967296 + (BE - 1 - number)
    return BE - 1 - (tl.sort(keys, descending=True) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _best_groups(
    preference, valid, number, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Whether an expert is in one of the best groups, by the largest or the two largest of each."""
    group = number // SIZE
    slot = tl.arange(0, BG)
    merits = tl.full((BG,), -float("inf"), tl.float32)
    for g in range(GROUPS):
        inside = valid & (group == g)
        merit, first = _largest(preference, inside, number, BE)
        if TOP2:
            merit += tl.max(tl.where(inside & (number != first), preference, -float("inf")))
        merits = tl.where(slot == g, merit, merits)
    merits = tl.where(merits == merits, merits, float("inf"))
    kept = tl.zeros((BE,), tl.int1)
    left = slot < GROUPS
    for _ in range(TOP_GROUPS):
        _, best = _largest(merits, left, slot, BG)
        left = left & (slot != best)
        kept = kept | (group == best)
    return kept


@triton.jit
def _sum_of_first(x, slot, COUNT: tl.constexpr):
    """x_0 + x_1 + ..., one after another."""
    total = 0.0
    for place in range(COUNT):
        total += tl.sum(tl.where(slot == place, x, 0.0))
    return total


@triton.jit
def router_scores(
    logits, selection_bias, out_0, out_1,
    E: tl.constexpr, TOP_K: tl.constexpr, RANKED: tl.constexpr, SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, EPS: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    BY_LOGITS: tl.constexpr, SORT: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The best experts of a token and their weights."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BE)
    valid = number < E
    x = tl.load(logits + token * E + number, mask=valid, other=-float("inf")).to(tl.float32)
    most = tl.max(x)
    total = tl.sum(tl.exp(x - most))
    preference = x
    if SCORING == "sigmoid":
        preference = sigmoid(x)
    elif not BY_LOGITS:
        preference = tl.exp(x - most) / total
    if selection_bias is not None:
        preference += tl.load(selection_bias + number, mask=valid, other=0.0).to(tl.float32)
    preference = tl.where(preference == preference, preference, float("inf"))
    if GROUPS > 1:
        kept = _best_groups(preference, valid, number, E // GROUPS, GROUPS, TOP_GROUPS, TOP2, BE, BG)
        preference = tl.where(kept, preference, -float("inf"))
    chosen = _sorted(preference, valid, number, BE) if SORT else _best(preference, valid, number, RANKED, BE, BR)
    slot = tl.arange(0, BR)
    stored = slot < RANKED
    best = tl.load(logits + token * E + chosen, mask=stored, other=0.0).to(tl.float32)
    if SCORING == "sigmoid":
        weight = sigmoid(best)
    elif SCORING == "softmax":
        weight = tl.exp(best - most) / total
    else:
        weight = tl.exp(best - tl.sum(tl.where(slot == 0, best, 0.0)))
        weight = weight / _sum_of_first(weight, slot, TOP_K)
    if RENORMALIZE:
        weight = weight / (_sum_of_first(weight, slot, TOP_K) + EPS)
    tl.store(out_0 + token * RANKED + slot, weight * SCALING, mask=stored)
    tl.store(out_1 + token * RANKED + slot, chosen, mask=stored)


@triton.jit
def router_sparsemixer(
    logits, out_0, out_1,
    E: tl.constexpr, TOP_K: tl.constexpr, RANKED: tl.constexpr, JITTER: tl.constexpr,
    RENORMALIZE: tl.constexpr, EPS: tl.constexpr, SCALING: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The largest logit left, weighted by its softmax over those left that are near it; again and again."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BE)
    slot = tl.arange(0, BR)
    left = number < E
    x = tl.load(logits + token * E + number, mask=left, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    weight = tl.zeros((BR,), tl.float32)
    chosen = tl.zeros((BR,), tl.int32)
    for place in range(RANKED):
        best, expert = _largest(x, left, number, BE)
        far = (best - x) / tl.maximum(tl.abs(x), best) > 2.0 * JITTER
        near = tl.sum(tl.exp(tl.where(left & (far == 0), x - best, -float("inf"))))
        left = left & (number != expert)
        weight = tl.where(slot == place, 1.0 / near, weight)
        chosen = tl.where(slot == place, expert, chosen)
    if RENORMALIZE:
        weight = weight / (_sum_of_first(weight, slot, TOP_K) + EPS)
    tl.store(out_0 + token * RANKED + slot, weight * SCALING, mask=slot < RANKED)
    tl.store(out_1 + token * RANKED + slot, chosen, mask=slot < RANKED)


def router(call: Call) -> Plan:
    """Any number of experts, groups and choices."""
    (result, _), attributes = call.results, call.attributes
    experts, ranked = int(call.operand("logits").shape[1]), int(result.shape[1])
    scoring, groups = attributes["scoring"], attributes.get("num_groups", 1)
    width = power_of_2(experts)
    constants = {
        "E": experts,
        "TOP_K": attributes["top_k"],
        "RANKED": ranked,
        "RENORMALIZE": attributes.get("renormalize", False),
        "EPS": attributes.get("renormalize_eps", 0.0),
        "SCALING": attributes.get("scaling", 1.0),
        "BE": width,
    }
    kernel: Any
    if scoring == "sparsemixer":
        kernel, sort = router_sparsemixer, False
        constants |= {"JITTER": attributes.get("jitter_eps", 0.0)}
    else:
        kernel, sort = router_scores, ranked >= SORTED_FROM
        constants |= {
            "SCORING": scoring,
            # Probabilities may be equal where logits differ.
            "BY_LOGITS": scoring == "softmax_topk" or (groups == 1 and not call.has("selection_bias")),
            "GROUPS": groups,
            "TOP_GROUPS": attributes.get("top_groups", 1),
            "TOP2": attributes.get("group_score", "top2") == "top2",
            "BG": power_of_2(groups),
            "SORT": sort,
        }
    constants |= {"BR": width if sort else power_of_2(ranked)}
    warps = max(1, min(8, width // 512))
    return Plan((Launch(kernel, lambda s: (s.T,), ("out_0", "out_1"), constants, num_warps=warps),))
