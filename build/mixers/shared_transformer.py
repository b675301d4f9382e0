"""A transformer block whose weights several layers use (Zamba)."""

from __future__ import annotations

from dataclasses import replace

from hybridtrt.build.ffns.mlp import mlp
from hybridtrt.build.mixers.attention import attention
from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import SharedTransformerConfig


def shared_transformer(scope: Scope, x: str, config: SharedTransformerConfig, shared: Shared) -> str:
    """Norm of x beside the embeddings, attention, norm, MLP by shared weights; a projection of the layer's own."""
    common = replace(scope, weights_prefix=config.shared_prefix)
    (y,) = scope.call("concat", "with_embeddings", x, shared.embeddings)
    y = common.norm(y, "attention_norm")
    y = attention(common.inner("attention"), y, config.attention, shared)
    y = common.norm(y, "mlp_norm")
    y = mlp(common.inner("mlp"), y, config.mlp)
    return scope.linear(y, "out")
