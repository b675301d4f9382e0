"""The network of any hybrid model, written once: `ModelConfig` to `Program`."""

from __future__ import annotations

from collections.abc import Iterable

from hybridtrt.build.capacity import Capacity
from hybridtrt.build.ffns import FFNS
from hybridtrt.build.mixers import MIXERS
from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared
from hybridtrt.converters.config import Block, ModelConfig
from hybridtrt.plugins.caches import CacheSpec
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.spec import TensorSpec


def build_program(
    config: ModelConfig, caches: Iterable[CacheSpec] | None = None, capacity: Capacity | None = None
) -> Program:
    """All operator calls from token ids `[T]` to `logits` `[R, vocab]`.

    `caches` are the model's in other dtypes than its own; `capacity` bounds its experts. Raises `ValueError`, naming
    the node, where the description does not fit together.
    """
    program = Program(
        weights={
            name: TensorSpec(spec.shape, "float32" if spec.full_precision else config.dtype)
            for name, spec in config.weight_table().items()
        },
        caches={spec.name: spec for spec in (config.caches() if caches is None else caches)},
    )
    scope = Scope(program, "", config.norm_eps, capacity=capacity)
    ids = program.add_input("input_ids", TensorSpec(("T",), "int32"))
    positions = program.add_input("positions", TensorSpec(("T",), "int32"))
    (x,) = program.call("embedding", "embedding", ids, weights={"weight": "embedding.weight"})
    if config.embedding_multiplier != 1.0:
        (x,) = scope.call("scale", "embedding_scaled", x, by=config.embedding_multiplier)
    if config.embedding_affine:
        x = scope.affine(x, "embedding_affine")
    ropes = []
    for i, rope in enumerate(config.ropes):
        frequencies = {"inv_freq": list(rope.inv_freq), "attention_factor": rope.attention_factor}
        cos, sin = scope.call("rotary_table", f"ropes.{i}", positions, **frequencies)
        ropes.append((cos, sin))
    shared = Shared(ropes=tuple(ropes), embeddings=x)
    for i, layer in enumerate(config.layers):
        start = x
        for block in layer.blocks:
            x = _block(scope.inner(f"layers.{i}"), x, block, shared, start)
    (x,) = scope.call("gather_rows", "last_tokens", x)
    x = scope.norm(x, "final_norm")
    head = {"weight": "embedding.weight" if config.tie_word_embeddings else "lm_head.weight"}
    if config.head_bias:
        head["bias"] = "lm_head.bias"
    (logits,) = program.call("linear", "lm_head", x, weights=head)
    if config.logits_multiplier != 1.0:
        (logits,) = scope.call("scale", "logits", logits, by=config.logits_multiplier)
    if config.logits_softcap is not None:
        (logits,) = scope.call("scale", "capped_in", logits, by=1.0 / config.logits_softcap)
        (logits,) = scope.call("activation", "capped", logits, kind="tanh")
        (logits,) = scope.call("scale", "capped_out", logits, by=config.logits_softcap)
    program.outputs = (logits,)
    unread = program.weights.keys() - {weight for node in program.nodes for weight in node.weights.values()}
    if unread:
        raise ValueError(f"the network does not read these weights: {', '.join(sorted(unread))}")
    return program


def _block(scope: Scope, x: str, block: Block, shared: Shared, start: str) -> str:
    """One block of a layer that began with the value `start`."""
    first = block.branches[0].kind
    normed = scope.norm(x, f"{first}.pre_norm") if block.pre_norm else x
    total = ""
    ones = (1.0,) * len(block.branches)
    multipliers = zip(block.in_multipliers or ones, block.out_multipliers or ones, strict=True)
    for branch, (before, after) in zip(block.branches, multipliers, strict=True):
        inner = scope.inner(branch.kind)
        y = _scaled(inner, normed, "in_scaled", before)
        y = (
            MIXERS[branch.kind](inner, y, branch, shared)
            if branch.kind in MIXERS
            else FFNS[branch.kind](inner, y, branch)
        )
        y = _scaled(inner, y, "out_scaled", after)
        total = scope.call("add", f"{branch.kind}.sum", total, y)[0] if total else y
    if block.post_norm:
        total = scope.norm(total, f"{first}.post_norm")
    residual = {"input": x, "normed": normed, "layer": start}[block.residual]
    skip = _scaled(scope, residual, f"{first}.skip", block.skip_multiplier)
    if block.affine:
        total, skip = scope.affine(total, f"{first}.sum_affine"), scope.affine(skip, f"{first}.skip_affine")
    return scope.call("add", f"{first}.residual", skip, total, scale=block.residual_multiplier)[0]


def _scaled(scope: Scope, x: str, name: str, by: float) -> str:
    return x if by == 1.0 else scope.call("scale", name, x, by=by)[0]
