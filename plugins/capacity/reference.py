"""Places at the experts, handed out one after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridtrt.plugins.capacity import expert_capacity
from hybridtrt.plugins.ragged import Step


def capacity(
    step: Step, weights: Tensor, experts: Tensor, *, top_k: int, num_experts: int, factor: float, overflow: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and expert numbers `[T, top_k]`, then tokens by expert and overflow by expert, `[num_experts]` int32.

    Each expert has `expert_capacity` places for the tokens of the step. First every pair of a token and one of its
    top_k experts asks for a place there, by descending weight, then by token, then by the token's order. Overflow
    counts those that find none. "drop" loses them; with "next_best" they go on, again by the weight of what they
    asked for, and each takes the first expert of the token's order beyond the top_k that has room and that the token
    has not, with the weight that stands there.

    A lost pair has weight 0 and number `num_experts`, which stands for no expert. Numbers from there on are no experts
    in the input either: they have room for all and are not counted. Tokens of padding rows lose all pairs and neither
    count nor ask. Weights that are NaN come last.
    """
    real, order, priorities = step.real_tokens.tolist(), experts.tolist(), weights.tolist()
    most = expert_capacity(factor, sum(real), top_k, num_experts)
    load, refused = [0] * num_experts, [0] * num_experts
    places: list[dict[int, int]] = [{} for _ in order]  # of each token: pair to the place in its order

    def seat(token: int, pair: int, place: int) -> bool:
        expert = order[token][place]
        if place in places[token].values() or (expert < num_experts and load[expert] == most):
            return False
        if expert < num_experts:
            load[expert] += 1
        places[token][pair] = place
        return True

    def priority(pair: tuple[int, int]) -> float:
        weight = priorities[pair[0]][pair[1]]
        return math.inf if math.isnan(weight) else -weight

    lost = []
    for token, pair in sorted(((t, j) for t in range(len(order)) if real[t] for j in range(top_k)), key=priority):
        if not seat(token, pair, pair):
            refused[order[token][pair]] += 1
            lost.append((token, pair))
    if overflow == "next_best":
        for token, pair in lost:
            any(seat(token, pair, place) for place in range(top_k, len(order[token])))

    kept = weights.new_zeros(len(order), top_k)
    numbers = experts.new_full((len(order), top_k), num_experts)
    for token, held in enumerate(places):
        for pair, place in held.items():
            kept[token, pair], numbers[token, pair] = weights[token, place], experts[token, place]
    return kept, numbers, torch.tensor(load, dtype=torch.int32), torch.tensor(refused, dtype=torch.int32)
