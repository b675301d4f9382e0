"""What a family of models is: how its `config.json` reads and where its weights lie."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.hf_config import MAX_LAYERS, HFConfig
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
    prefix in the checkpoint). `prediction_layers` are spellings of the key that says how many layers for multi-token
    prediction follow the last one, 1 if it is absent; they are not needed either.
    """

    model_types: tuple[str, ...]
    config: Callable[[HFConfig], ModelConfig]
    sources: Callable[[ModelConfig], Sources]
    ignored: tuple[str, ...] = ()
    nestings: tuple[Nesting, ...] = ()
    prediction_layers: tuple[str, ...] = ()

    def ignores(self, hf: HFConfig, config: ModelConfig) -> tuple[str, ...]:
        """Patterns of the tensors of a checkpoint that are not needed."""
        count = 0
        if self.prediction_layers:
            count = hf.integer(hf.spelled(*self.prediction_layers), 1, minimum=0, maximum=MAX_LAYERS)
        last = len(config.layers)
        return (*self.ignored, *(f"model.layers.{i}.*" for i in range(last, last + count)))

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
