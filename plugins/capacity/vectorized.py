"""The place of every pair at its expert by two sorts; only pairs that go on are handled one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.capacity import expert_capacity
from hybridtrt.plugins.ragged import Step


def capacity(
    step: Step, weights: Tensor, experts: Tensor, *, top_k: int, num_experts: int, factor: float, overflow: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the definition."""
    real = step.real_tokens
    most = expert_capacity(factor, int(real.sum()), top_k, num_experts)
    kept, numbers = weights[:, :top_k].flatten(), experts[:, :top_k].flatten()
    asks = real.repeat_interleave(top_k)
    bounded = torch.where(asks, numbers, num_experts).clamp(max=num_experts)  # by expert; the last are bound by nothing
    by_priority = torch.where(kept.isnan(), -torch.inf, kept).argsort(descending=True, stable=True)
    by_expert = by_priority[bounded[by_priority].argsort(stable=True)]
    counts = bounded.bincount(minlength=num_experts + 1)
    place = torch.empty_like(bounded)
    place[by_expert] = torch.arange(len(bounded)) - (counts.cumsum(0) - counts)[bounded[by_expert]]
    full = (bounded < num_experts) & (place >= most)
    load = counts[:num_experts].clamp(max=most)
    refused = counts[:num_experts] - load
    gone = full | ~asks
    kept, numbers = kept.masked_fill(gone, 0.0), numbers.masked_fill(gone, num_experts)
    if overflow == "next_best":
        lost = by_priority[full[by_priority]].tolist()
        _go_on(lost, (weights, experts), (kept, numbers), load, most)
    shape = (len(weights), top_k)
    return kept.view(shape), numbers.view(shape), load.int(), refused.int()


def _go_on(
    lost: list[int], ranked: tuple[Tensor, Tensor], chosen: tuple[Tensor, Tensor], load: Tensor, most: int
) -> None:
    """Give lost pairs, numbered token by token, the next places in their token's order; updates `chosen` and `load`."""
    top_k = len(chosen[0]) // len(ranked[0])
    orders, taken = ranked[1].tolist(), {pair // top_k: set[int]() for pair in lost}
    room = [most - count for count in load.tolist()]
    for pair in lost:
        token = pair // top_k
        for place in range(top_k, len(orders[token])):
            expert = orders[token][place]
            if place not in taken[token] and (expert >= len(room) or room[expert]):
                taken[token].add(place)
                if expert < len(room):
                    room[expert] -= 1
                for source, target in zip(ranked, chosen, strict=True):
                    target[pair] = source[token, place]
                break
    load.copy_(most - torch.tensor(room))
