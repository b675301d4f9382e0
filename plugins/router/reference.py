"""softmax: over all experts, then the k largest; softmax_topk: over the k largest logits."""

from __future__ import annotations

from torch import Tensor

from hybridtrt.plugins.ragged import Step


def router(step: Step, logits: Tensor, *, top_k: int, scoring: str, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    """Weights and expert numbers, `[T, k]` each, largest first."""
    if scoring == "softmax_topk":
        chosen, experts = logits.topk(top_k, dim=-1)
        return chosen.softmax(-1), experts
    weights, experts = logits.softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
