"""The gated delta rule (Gated DeltaNet)."""

from __future__ import annotations

from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.mixers import GatedDeltaConfig


def gated_delta(scope: Scope, x: str, config: GatedDeltaConfig, shared: Shared) -> str:
    """Gated DeltaNet: q, k, v through a convolution, the gated delta rule, a gated norm for each head."""
    heads, v_shape = config.num_v_heads, (config.num_v_heads, config.head_v_dim)
    k_shape = (config.num_k_heads, config.head_k_dim)
    qkv, z, b, a = scope.split(scope.linear(x, "in_proj"), "split", (config.conv_dim,), v_shape, (heads,), (heads,))
    q, k, v = scope.split(scope.conv(qkv), "split_qkv", k_shape, k_shape, v_shape)
    (y,) = scope.program.call(
        "linear_attention",
        scope.path("core"),
        q,
        k,
        v,
        a,
        b,
        weights={name: scope.weight(name) for name in ("A_log", "dt_bias")},
        caches={"state": scope.path("state")},
        rule="gated_delta",
        scale=config.head_k_dim**-0.5,
        l2_norm=True,
        beta_scale=config.beta_scale,
    )
    y = scope.norm(y, "norm", gate=z, eps=config.norm_eps)
    return scope.linear(scope.call("flatten", "heads", y)[0], "out_proj")
