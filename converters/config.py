"""The one canonical model description. Nothing after conversion knows the names of families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridtrt.converters.ffns import FFNS, Ffn
from hybridtrt.converters.mixers import MIXERS, Mixer, SharedTransformerConfig
from hybridtrt.converters.plain_data import from_plain, to_plain
from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """A rotary table: cos and sin of position * inv_freq, times `attention_factor`.

    It turns the first `2 * len(inv_freq)` channels of each head, in halves: channel i with channel i + len(inv_freq).
    Checkpoints of models that turn neighbouring channels are permuted at conversion. The table holds for sequences of
    at most `max_positions` tokens; None: of any length.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    max_positions: int | None = None


@dataclass(frozen=True)
class Block:
    """skip_multiplier * r + residual_multiplier * post_norm(sum(out * branch(in * n))) with n = pre_norm(x).

    Branches run in parallel on the same n, each with its multipliers `in` and `out`; r is the block's input x, or n,
    or the input of the layer. With `affine` both sides of the sum take a learned bias and scale for each channel.
    """

    branches: tuple[Mixer | Ffn, ...]
    residual_multiplier: float = 1.0
    skip_multiplier: float = 1.0
    pre_norm: bool = True
    post_norm: bool = False
    residual: Literal["input", "normed", "layer"] = "input"
    in_multipliers: tuple[float, ...] = ()  # one a branch; none: 1
    out_multipliers: tuple[float, ...] = ()
    affine: bool = False

    def __post_init__(self) -> None:
        for multipliers in (self.in_multipliers, self.out_multipliers):
            if len(multipliers) not in (0, len(self.branches)):
                raise ValueError(f"{len(multipliers)} multipliers of {len(self.branches)} branches")


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
    norm: Literal["rms", "layer"] = "rms"  # the latter with bias
    ropes: tuple[RopeConfig, ...] = ()  # attention layers name theirs by index
    tie_word_embeddings: bool = False
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    embedding_affine: bool = False  # a learned bias and scale for each channel of the embeddings
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None  # logits become softcap * tanh(logits / softcap), last
    dtype: str = "float32"  # of the stored matrices
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        shared: dict[int, Mixer] = {}
        for i, layer in enumerate(self.layers):
            kinds = [branch.kind for branch in layer.branches()]
            if len(set(kinds)) != len(kinds):
                raise ValueError(f"layer {i} has two branches of one kind: {kinds}")
            if not all(block.branches for block in layer.blocks):
                raise ValueError(f"layer {i} has a block without a branch")
            for branch in layer.branches():
                if isinstance(branch, SharedTransformerConfig) and shared.setdefault(branch.block, branch) != branch:
                    raise ValueError(f"layer {i}: another layer uses the shared block {branch.block} differently")
                rope = getattr(branch, "rope", None)
                if rope is not None and not 0 <= rope < len(self.ropes):
                    raise ValueError(
                        f"layer {i}: rope={rope} is not one of the model's {len(self.ropes)} rotary tables"
                    )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence for which the positions are those of the model."""
        limits = [rope.max_positions for rope in self.ropes if rope.max_positions is not None]
        return min([self.max_position_embeddings, *limits])

    def weight_table(self) -> WeightTable:
        """Every weight of the network: canonical name to shape and storage rule, in network order."""
        table: WeightTable = {"embedding.weight": matrix(self.vocab_size, self.hidden_size)}
        if self.embedding_affine:
            table |= self._affine_weights("embedding_affine")
        for i, layer in enumerate(self.layers):
            for block in layer.blocks:
                first = f"layers.{i}.{block.branches[0].kind}"
                for name, there in (("pre_norm", block.pre_norm), ("post_norm", block.post_norm)):
                    if there:
                        table |= self._norm_weights(f"{first}.{name}")
                if block.affine:
                    table |= self._affine_weights(f"{first}.sum_affine") | self._affine_weights(f"{first}.skip_affine")
                for branch in block.branches:
                    for name, spec in branch.weights(self.hidden_size).items():
                        table[f"layers.{i}.{branch.kind}.{name}"] = spec
                    if isinstance(branch, SharedTransformerConfig):
                        table |= branch.shared_weights(self.hidden_size)
        table |= self._norm_weights("final_norm")
        if not self.tie_word_embeddings:
            table["lm_head.weight"] = matrix(self.vocab_size, self.hidden_size)
        if self.head_bias:
            table["lm_head.bias"] = precise(self.vocab_size)
        return table

    def _norm_weights(self, name: str) -> WeightTable:
        parts = ("weight",) if self.norm == "rms" else ("weight", "bias")
        return {f"{name}.{part}": precise(self.hidden_size) for part in parts}

    def _affine_weights(self, name: str) -> WeightTable:
        return {f"{name}.{part}": precise(self.hidden_size) for part in ("weight", "bias")}

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
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises `ValueError` for data that `to_dict` cannot have written."""
        try:
            config: ModelConfig = from_plain(cls, data, "model")
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"model description is damaged: {error}") from None
        return config
