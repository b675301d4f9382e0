"""Multi-head latent attention."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import MlaConfig


def mla(scope: Scope, x: str, config: MlaConfig, shared: Shared) -> str:
    """Queries and one compressed vector a token, attention over its keys and values, an optional gate a head."""
    if config.q_rank is None:
        q = scope.linear(x, "q")
    else:
        q = scope.linear(scope.norm(scope.linear(x, "q_down"), "q_norm", eps=config.norm_eps), "q_up")
    heads = config.num_heads
    q_nope, q_rope = scope.split(q, "split_q", (heads, config.nope_dim), (heads, config.rope_dim))
    latent, k_rope = scope.split(scope.linear(x, "kv_down"), "split_kv", (config.kv_rank,), (1, config.rope_dim))
    latent = scope.norm(latent, "kv_norm", eps=config.norm_eps)
    if config.rope is not None:
        (q_rope,) = scope.call("rotary", "q_rotary", q_rope, *shared.ropes[config.rope])
        (k_rope,) = scope.call("rotary", "k_rotary", k_rope, *shared.ropes[config.rope])
    (page_spec,) = config.caches(scope.prefix)
    (y,) = scope.program.call(
        "mla",
        scope.path("core"),
        q_nope,
        q_rope,
        latent,
        k_rope,
        weights={"up": scope.weight("kv_up.weight")},
        caches={"kv": page_spec.name},
        group=page_spec.group,
        scale=config.scale,
    )
    if config.head_gate:
        (gate,) = scope.call("activation", "gate_opened", scope.linear(x, "head_gate"), kind="sigmoid")
        (y,) = scope.call("multiply", "gated", y, *scope.split(gate, "head_gates", (heads, 1)))
    return scope.linear(scope.call("flatten", "heads", y)[0], "dense")
