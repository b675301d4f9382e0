"""Scores of the experts, the best k of them, and their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "softmax_topk": lambda logits: logits,
    "sigmoid": torch.sigmoid,
}


def router(
    step: Step,
    logits: Tensor,
    *,
    selection_bias: Tensor | None = None,
    top_k: int,
    scoring: str,
    renormalize: bool = False,
    renormalize_eps: float = 0.0,
    scaling: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    jitter_eps: float = 0.0,
    num_ranked: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and expert numbers, `[T, k]` each, best first. `RouterConfig` says what the attributes mean.

    With `num_ranked` the experts that would have been next follow, `[T, num_ranked]` in all. The first k are as they
    are without it; the others have the weights that their scores give by the sums over those k ("sparsemixer": as if
    it went on choosing).
    """
    ranked = num_ranked or top_k
    if scoring == "sparsemixer":
        weights, experts = _sparsemixer(logits, ranked, jitter_eps)
    else:
        scores = _SCORES[scoring](logits)
        preference = scores if selection_bias is None else scores + selection_bias
        if num_groups > 1:
            preference = _best_groups(preference, num_groups, top_groups, group_score)
        experts = _best(preference, top_k, ranked)
        weights = scores.gather(-1, experts)
        if scoring == "softmax_topk":
            weights = _softmax_of_first(weights, top_k)
    if renormalize:
        weights = weights / (weights[:, :top_k].sum(-1, keepdim=True) + renormalize_eps)
    return weights * scaling, experts


def _best(preference: Tensor, top_k: int, ranked: int) -> Tensor:
    """Numbers of the best, in order; among those after the first `top_k` equals come in the order of their numbers."""
    first = preference.topk(top_k, dim=-1).indices
    if ranked == top_k:
        return first
    rest = preference.scatter(-1, first, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return torch.cat([first, rest[:, : ranked - top_k]], -1)


def _softmax_of_first(logits: Tensor, top_k: int) -> Tensor:
    """Softmax over the first `top_k`, the largest of which is the first; the rest by the same sum."""
    first = logits[:, :top_k].softmax(-1)
    return torch.cat([first, first[:, :1] * (logits[:, top_k:] - logits[:, :1]).exp()], -1)


def _best_groups(preference: Tensor, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    """Minus infinity for the experts of all but the best groups."""
    grouped = preference.unflatten(-1, (num_groups, -1))  # [T, groups, experts / groups]
    merit = grouped.topk(2 if group_score == "top2" else 1, dim=-1).values.sum(-1)
    refused = torch.ones_like(merit, dtype=torch.bool).scatter_(-1, merit.topk(top_groups, dim=-1).indices, False)
    masked: Tensor = grouped.masked_fill(refused.unsqueeze(-1), -torch.inf).flatten(-2)
    return masked


def _sparsemixer(logits: Tensor, top_k: int, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """The largest logit left, weighted by its softmax over those left that are near it; `top_k` times."""
    left, weights, experts = logits, [], []
    for _ in range(top_k):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter_eps
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)
