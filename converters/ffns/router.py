"""How the experts of a token are chosen and weighted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RouterConfig:
    """How router logits (float32) become the weights of the chosen experts.

    `scoring` "softmax" takes the softmax over all experts, then the top k; "softmax_topk" takes the top k logits,
    then their softmax. `renormalize` divides the chosen weights by their sum.
    """

    scoring: Literal["softmax", "softmax_topk"] = "softmax"
    renormalize: bool = False
