"""The one canonical model description. Nothing after conversion knows the names of families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hybridtrt.converters.ffns import FFNS, Ffn, RouterConfig
from hybridtrt.converters.mixers import MIXERS, Mixer
from hybridtrt.converters.plain_data import checked
from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` channels of each head, in halves (not interleaved)."""

    theta: float
    rotary_dim: int


@dataclass(frozen=True)
class Block:
    """x + residual_multiplier * sum(branch(norm(x))). Branches run in parallel on the same normed input."""

    branches: tuple[Mixer | Ffn, ...]
    residual_multiplier: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """Blocks in order; within a layer every branch kind occurs once, so that it can name the weights."""

    blocks: tuple[Block, ...]

    def branches(self) -> Iterator[Mixer | Ffn]:
        """All branches in order."""
        for block in self.blocks:
            yield from block.branches

    def mixer_names(self) -> str:
        return "+".join(branch.kind for branch in self.branches() if branch.kind in MIXERS) or "-"

    def ffn_names(self) -> str:
        return "+".join(branch.kind for branch in self.branches() if branch.kind in FFNS) or "-"


@dataclass(frozen=True)
class ModelConfig:
    """Global numbers and the list of layers. `eos_token_ids` end a generation by default."""

    architecture: str  # the family it came from, for people
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    dtype: str = "float32"  # of the stored matrices
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        for i, layer in enumerate(self.layers):
            kinds = [branch.kind for branch in layer.branches()]
            if len(set(kinds)) != len(kinds):
                raise ValueError(f"layer {i} has two branches of one kind: {kinds}")
            if not all(block.branches for block in layer.blocks):
                raise ValueError(f"layer {i} has a block without a branch")

    def weight_table(self) -> WeightTable:
        """Every weight of the network: canonical name to shape and storage rule, in network order."""
        table: WeightTable = {"embedding.weight": matrix(self.vocab_size, self.hidden_size)}
        for i, layer in enumerate(self.layers):
            for block in layer.blocks:
                table[f"layers.{i}.{block.branches[0].kind}.pre_norm.weight"] = precise(self.hidden_size)
                for branch in block.branches:
                    for name, spec in branch.weights(self.hidden_size).items():
                        table[f"layers.{i}.{branch.kind}.{name}"] = spec
        table["final_norm.weight"] = precise(self.hidden_size)
        if not self.tie_word_embeddings:
            table["lm_head.weight"] = matrix(self.vocab_size, self.hidden_size)
        return table

    def caches(self) -> list[CacheSpec]:
        """Every page and state pool of the network, layer by layer."""
        return [
            spec
            for i, layer in enumerate(self.layers)
            for branch in layer.branches()
            if isinstance(branch, Mixer)
            for spec in branch.caches(f"layers.{i}.{branch.kind}")
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the kind of every branch written out."""
        data = asdict(self)
        data["layers"] = [{"blocks": [_block_dict(block) for block in layer.blocks]} for layer in self.layers]
        data["eos_token_ids"] = list(self.eos_token_ids)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises `ValueError` for data that `to_dict` cannot have written."""
        try:
            layers = tuple(LayerConfig(tuple(_block(block) for block in layer["blocks"])) for layer in data["layers"])
            rope = None if data["rope"] is None else RopeConfig(**checked(RopeConfig, data["rope"]))
            converted = {"layers": layers, "rope": rope, "eos_token_ids": tuple(data["eos_token_ids"])}
            return cls(**checked(cls, {**data, **converted}))
        except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise ValueError(f"model description is damaged: {type(error).__name__} {error}") from None


def _block_dict(block: Block) -> dict[str, Any]:
    branches = [{"kind": branch.kind, **asdict(branch)} for branch in block.branches]
    return {"branches": branches, "residual_multiplier": block.residual_multiplier}


def _block(data: Mapping[str, Any]) -> Block:
    branches = tuple(_branch(branch) for branch in data["branches"])
    return Block(**checked(Block, {**data, "branches": branches}))


def _branch(data: Mapping[str, Any]) -> Mixer | Ffn:
    fields = dict(data)
    kind = fields.pop("kind")
    if "router" in fields:
        fields["router"] = RouterConfig(**checked(RouterConfig, fields["router"]))
    branches: dict[str, type[Mixer] | type[Ffn]] = {**MIXERS, **FFNS}
    if kind not in branches:
        raise ValueError(f"branch kind {kind!r} is not known; known: {', '.join(branches)}")
    branch: type[Any] = branches[kind]
    made: Mixer | Ffn = branch(**checked(branch, fields))
    return made
