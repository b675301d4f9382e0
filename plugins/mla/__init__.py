"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of compressed tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec, require


def _infer(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any]
) -> list[TensorSpec]:
    q_nope, q_rope, latent, k_rope = (operand.shape for operand in inputs)
    up = weights["up"].shape
    require(len(q_nope) == 3 and q_nope[:2] == q_rope[:2], f"q_nope {q_nope} and q_rope {q_rope} differ in heads")
    require(k_rope[1:] == (1, q_rope[2]), f"k_rope {k_rope} is not one head like q_rope {q_rope}")
    heads, nope = int(q_nope[1]), int(q_nope[2])
    fits = up[1] == latent[1] and int(up[0]) % heads == 0 and int(up[0]) // heads > nope
    require(fits, f"up {up} does not expand latent {latent} to keys and values of q_nope {q_nope}")
    return [TensorSpec((q_nope[0], heads, int(up[0]) // heads - nope), inputs[0].dtype)]


def _flops(
    inputs: list[TensorSpec], weights: Mapping[str, TensorSpec], attributes: Mapping[str, Any], load: Load
) -> int:
    """As absorbed: queries into the latent space, attention there, the result to values. Long rows may take fewer."""
    _, heads, _ = inputs[0].shape
    rows, rank = (int(dim) for dim in weights["up"].shape)
    per_key = int(heads) * (2 * rank + int(inputs[1].shape[2]))
    return 2 * load.size(inputs[0].shape[:1]) * rows * rank + 2 * load.attended * per_key


SPECS = (
    OpSpec(
        name="mla",
        # [T, heads, nope_dim], [T, heads, rope_dim], [T, rank], [T, 1, rope_dim]
        inputs=("q_nope", "q_rope", "latent", "k_rope"),
        weights=("up",),  # [heads (nope_dim + v_dim), rank]: head by head its keys, then its values
        caches=("kv",),  # [pages, page_size, rank + rope_dim]
        attributes=("group", "scale"),
        step_inputs=("positions", "cu_seqlens", "context_lens", "block_tables"),
        infer=_infer,
        flops=_flops,
    ),
)
