"""One rank's part of a model under tensor, expert and pipeline parallelism, as a smaller model description.

Heads, channels and experts are divided; key/value heads and groups that are fewer than the ranks are copied; compressed
caches, norms and routers are copied. So the weights and caches of the smaller description are those of the rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.ffns import MoeConfig, RouterConfig

DIVIDED = (
    "num_heads",
    "num_k_heads",
    "num_v_heads",
    "inner",
    "channels",
    "width",
    "intermediate",
    "shared_intermediate",
)
COPIED = ("num_kv_heads", "n_groups", "norm_groups")  # where they are fewer than the ranks


@dataclass(frozen=True)
class Split:
    """Tensor, expert and pipeline parallel sizes of `tp * pp` GPUs; `ep` of the `tp` ranks divide the experts, and each
    expert is divided among `tp / ep` ranks, as in TensorRT-LLM."""

    tp: int
    ep: int
    pp: int

    def __str__(self) -> str:
        return f"TP {self.tp}, EP {self.ep}, PP {self.pp}"


def splits(num_gpus: int, has_experts: bool) -> list[Split]:
    """Every split of exactly `num_gpus` GPUs."""
    return [
        Split(tp, ep, num_gpus // tp) for tp in _divisors(num_gpus) for ep in (_divisors(tp) if has_experts else [1])
    ]


def stages(config: ModelConfig, split: Split) -> list[ModelConfig]:
    """The description of one rank of each pipeline stage.

    Embedding and head are divided by vocabulary and are in all descriptions, whichever stages hold them. The router of
    a description is a stand-in. Raises `ValueError`, saying what does not divide, for a split that is not possible.
    """
    count = len(config.layers)
    if count % split.pp:
        raise ValueError(f"{count} layers do not divide into {split.pp} stages")
    layers = tuple(_layer(layer, split) for layer in config.layers)
    size = count // split.pp
    vocab = math.ceil(config.vocab_size / split.tp)
    return [replace(config, vocab_size=vocab, layers=layers[start : start + size]) for start in range(0, count, size)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _layer(layer: LayerConfig, split: Split) -> LayerConfig:
    return LayerConfig(tuple(_block(block, split) for block in layer.blocks))


def _block(block: Block, split: Split) -> Block:
    return replace(block, branches=tuple(_branch(branch, split) for branch in block.branches))


def _branch(branch: Any, split: Split) -> Any:
    if isinstance(branch, MoeConfig):
        return replace(
            branch,
            num_experts=_divided("moe.num_experts", branch.num_experts, split.ep),
            top_k=1,
            router=RouterConfig(),
            intermediate=_divided("moe.intermediate", branch.intermediate, split.tp // split.ep),
            shared_intermediate=_divided("moe.shared_intermediate", branch.shared_intermediate, split.tp),
        )
    return _mixer(branch, branch.kind, split.tp)


def _mixer(config: Any, kind: str, ranks: int) -> Any:
    changes: dict[str, Any] = {}
    names = [field.name for field in fields(config)]
    for name in names:
        value = getattr(config, name)
        if is_dataclass(value):
            changes[name] = _mixer(value, f"{kind}.{name}", ranks)
        elif name == "num_heads" and value == 1 and "inner" in names:
            continue  # one head of all channels: the channels are divided
        elif name in DIVIDED and isinstance(value, int):
            changes[name] = _divided(f"{kind}.{name}", value, ranks)
        elif name in COPIED:
            if value % ranks and ranks % value:
                raise ValueError(f"{kind}.{name}={value} neither divides by {ranks} nor divides it")
            changes[name] = max(1, value // ranks)
    return replace(config, **changes)


def _divided(name: str, value: int, ranks: int) -> int:
    if value % ranks:
        raise ValueError(f"{name}={value} does not divide by {ranks}")
    return value // ranks
