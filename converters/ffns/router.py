"""How the experts of a token are chosen and weighted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridtrt.converters.weights import WeightTable, precise


@dataclass(frozen=True)
class RouterConfig:
    """How router logits (float32) become the weights of the chosen experts.

    `scoring` makes scores of the logits: "softmax" over all experts, "sigmoid" of each, "softmax_topk" the logits
    themselves, of which the chosen ones pass a softmax. The top k scores are chosen; with `num_groups` > 1 only from
    the `top_groups` groups of neighbouring experts that score best, a group scoring the sum of its best two ("top2")
    or its best one ("max"). "sparsemixer" (arXiv 2409.12136) chooses the k largest logits one after another, each
    weighted by its softmax over the logits left that lie within 2 * `jitter_eps` of it, relative to their size.
    """

    scoring: Literal["softmax", "softmax_topk", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False  # the chosen weights are divided by their sum + `renormalize_eps`
    renormalize_eps: float = 0.0
    scaling: float = 1.0  # of the chosen weights, last
    bias: bool = False  # of the router's projection
    selection_bias: bool = False  # added to the scores for the choice, not to the weights
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    jitter_eps: float = 0.0

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise `ValueError` unless `top_k` of `num_experts` can be chosen."""
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"num_experts_per_tok={top_k} is not in 1..{num_experts} (number of experts)")
        if self.num_groups == 1:
            return
        if num_experts % self.num_groups:
            raise ValueError(f"n_group={self.num_groups} does not divide the {num_experts} experts")
        size = num_experts // self.num_groups
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"topk_group={self.top_groups} is not in 1..{self.num_groups} (n_group)")
        if self.group_score == "top2" and size < 2:
            raise ValueError(f"n_group={self.num_groups}: groups of {size} expert have no best two")
        if top_k > self.top_groups * size:
            raise ValueError(
                f"num_experts_per_tok={top_k} exceeds the {self.top_groups * size} experts of topk_group="
                f"{self.top_groups} groups"
            )


@dataclass(frozen=True)
class RouterMlpConfig:
    """Router logits by an MLP on a narrow projection of the token, to which the same of an earlier layer is added.

    `previous_layer` is the layer whose sum this one takes up, scaled channel by channel; None in the first.
    """

    hidden: int
    previous_layer: int | None = None

    def weights(self, hidden: int, num_classes: int) -> WeightTable:
        """Names relative to `router.`."""
        own = self.hidden
        table = {"down.weight": precise(own, hidden), "down.bias": precise(own), "norm.weight": precise(own)}
        for name in ("fc1", "fc2"):
            table |= {f"{name}.weight": precise(own, own), f"{name}.bias": precise(own)}
        if self.previous_layer is not None:
            table["state_scale.weight"] = precise(own)
        return table | {"out.weight": precise(num_classes, own)}
