"""Mixture of experts."""

from __future__ import annotations

from typing import Any

from hybridtrt.build.ffns.mlp import mlp
from hybridtrt.build.ffns.router_mlp import router_mlp
from hybridtrt.build.scope import Scope
from hybridtrt.converters.ffns import MoeConfig


def moe(scope: Scope, x: str, config: MoeConfig) -> str:
    """Routed experts, plus the shared expert where there is one."""
    weights, chosen = _route(scope, x, config)
    y = scope.linear(x, "latent_down") if config.latent else x
    up = "gate_up" if config.gated else "up"
    operands = {"up": up, "down": "down"}
    if config.expert_bias:
        operands |= {"up_bias": f"{up}_bias", "down_bias": "down_bias"}
    (y,) = scope.program.call(
        "experts",
        scope.path("experts"),
        y,
        weights,
        chosen,
        weights={role: scope.weight(f"experts.{name}") for role, name in operands.items()},
        activation=config.activation,
        gated=config.gated,
        clamp=config.clamp,
    )
    if config.latent:
        y = scope.linear(y, "latent_up")
    if config.shared is None:
        return y
    shared = mlp(scope.inner("shared"), x, config.shared)
    if config.shared_gate:
        (gate,) = scope.call("activation", "shared_opened", scope.linear(x, "shared_gate"), kind="sigmoid")
        (shared,) = scope.call("multiply", "shared_gated", shared, gate)
    return scope.call("add", "with_shared", y, shared)[0]


def _route(scope: Scope, x: str, config: MoeConfig) -> tuple[str, ...]:
    """Weights and numbers of the experts that take each token, `[T, k]` each."""
    router = config.router
    bias = {"selection_bias": scope.weight("router.selection_bias")} if router.selection_bias else {}
    if config.router_mlp is None:
        logits = scope.linear(x, "router")
    else:
        logits = router_mlp(scope.inner("router"), x, config.router_mlp)
    bound = scope.capacity
    ranked: dict[str, Any] = {} if bound is None else {"num_ranked": bound.num_ranked(config)}
    routing = scope.program.call(
        "router",
        scope.path("routing"),
        logits,
        weights=bias,
        top_k=config.top_k,
        scoring=router.scoring,
        renormalize=router.renormalize,
        renormalize_eps=router.renormalize_eps,
        scaling=router.scaling,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        group_score=router.group_score,
        jitter_eps=router.jitter_eps,
        **ranked,
    )
    if bound is None:
        return routing
    limits = {"top_k": config.top_k, "num_experts": config.num_experts}
    return scope.call("capacity", "capacity", *routing, **limits, factor=bound.factor, overflow=bound.overflow)[:2]
