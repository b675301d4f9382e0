"""The layers of Zamba and Zamba2: Mamba alone, or a shared transformer whose result Mamba reads beside its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.layouts import Decoder
from hybridtrt.converters.mixers import Mamba1Config, Mamba2Config, Mixer, SharedTransformerConfig
from hybridtrt.converters.sources import Named, Sources, either

DECODER = Decoder(final_norm="model.final_layernorm.weight")


def hybrid_layers(
    pattern: Sequence[str], mamba: Mixer, transformer: SharedTransformerConfig, blocks: int | None
) -> tuple[LayerConfig, ...]:
    """A layer for each entry of the pattern; those that are `hybrid` use the given number of shared blocks in turn.

    With None each has a block of its own: without tied embeddings transformers ties nothing else either.
    """
    alone = LayerConfig((Block((mamba,)),))
    layers, uses = [], 0
    for kind in pattern:
        if kind == "hybrid":
            shared = replace(transformer, block=uses if blocks is None else uses % blocks)
            layers.append(LayerConfig((Block((shared,), pre_norm=False), Block((mamba,), residual="layer"))))
            uses += 1
        else:
            layers.append(alone)
    return tuple(layers)


@dataclass(frozen=True)
class HybridLayout:
    """Names relative to a layer. `mamba(prefix, mixer)` and `transformer(prefix, config)` are relative to the branch.

    `adapters(prefix, config, use)` are those of the use of this number, which lie with the shared weights.
    """

    transformer_name: str
    mamba: Callable[[str, Mixer], Sources]
    transformer: Callable[[str, SharedTransformerConfig], Sources]
    adapters: Callable[[str, SharedTransformerConfig, int], Sources] = lambda prefix, config, use: {}

    def sources(self, config: ModelConfig) -> Sources:
        """Shared weights and adapters are those under the first layer of their block that has any in the checkpoint."""
        sources = DECODER.sources(replace(config, layers=()), lambda prefix, branch: {})
        uses: list[tuple[int, SharedTransformerConfig]] = []
        for i, layer in enumerate(config.layers):
            *transformer, last = layer.blocks
            prefix = f"model.layers.{i}.mamba_decoder" if transformer else f"model.layers.{i}"
            (mixer,) = last.branches
            assert isinstance(mixer, Mamba1Config | Mamba2Config)
            sources[f"layers.{i}.{mixer.kind}.pre_norm.weight"] = Named(f"{prefix}.input_layernorm.weight")
            sources |= _under(f"layers.{i}.{mixer.kind}", self.mamba(f"{prefix}.mamba", mixer), mixer, config)
            for block in transformer:
                (shared,) = block.branches
                assert isinstance(shared, SharedTransformerConfig)
                uses.append((i, shared))
        for use, (i, shared) in enumerate(uses):
            places = [f"model.layers.{j}.{self.transformer_name}" for j, other in uses if other.block == shared.block]
            own = either(*(self.adapters(place, shared, use) for place in places))
            own["out.weight"] = Named(f"model.layers.{i}.linear.weight")
            sources |= _under(f"layers.{i}.{shared.kind}", own, shared, config)
            common = either(*(self.transformer(place, shared) for place in places))
            for name in shared.shared_weights(config.hidden_size):
                sources[name] = common[name.removeprefix(f"{shared.shared_prefix}.")]
        return sources


def _under(prefix: str, found: Sources, branch: Mixer, config: ModelConfig) -> Sources:
    return {f"{prefix}.{name}": found[name] for name in branch.weights(config.hidden_size)}


def transformer_norms(prefix: str) -> Sources:
    """The norms of a shared transformer."""
    return {
        "attention_norm.weight": Named(f"{prefix}.input_layernorm.weight"),
        "mlp_norm.weight": Named(f"{prefix}.pre_ff_layernorm.weight"),
    }


def nested(prefix: str, sources: Sources) -> Sources:
    """The same sources for weights one level down."""
    return {f"{prefix}.{name}": source for name, source in sources.items()}
