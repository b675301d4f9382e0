"""What a family of models is: how its `config.json` reads and where its weights lie."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.sources import FirstOf, Sources, renamed

Nesting = tuple[tuple[str, str], ...]

# How a vision-language checkpoint holds its text model: as transformers 5 and version 4 save it.
TEXT_NESTINGS: tuple[Nesting, ...] = (
    (("model.", "model.language_model."),),
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
)


@dataclass(frozen=True)
class Family:
    """A `config.json` mapping and a table of weight names.

    `ignored` are patterns (of `fnmatch`) of checkpoint tensors that the network does not need. `nestings` are prefixes
    of tensor names in which a checkpoint may differ from `sources`: each a way to spell them, of pairs (prefix there,
    prefix in the checkpoint).
    """

    model_types: tuple[str, ...]
    config: Callable[[HFConfig], ModelConfig]
    sources: Callable[[ModelConfig], Sources]
    ignored: tuple[str, ...] = ()
    nestings: tuple[Nesting, ...] = ()

    def rules(self, config: ModelConfig, names: Container[str]) -> Sources:
        """The sources of a checkpoint with tensors of these names: in the first nesting that names its embedding."""
        sources = self.sources(config)
        shape = config.weight_table()["embedding.weight"].shape
        for nesting in self.nestings:
            nested = {weight: renamed(rule, nesting) for weight, rule in sources.items()}
            embedding = nested["embedding.weight"]
            alternatives = embedding.alternatives if isinstance(embedding, FirstOf) else (embedding,)
            if any(name in names for source in alternatives for name, _ in source.tensors(shape)):
                return nested
        return sources
