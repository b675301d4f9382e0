"""What a family of models is: how its `config.json` reads and where its weights lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.sources import Sources


@dataclass(frozen=True)
class Family:
    """A `config.json` mapping and a table of weight names.

    `ignored` are patterns (of `fnmatch`) of checkpoint tensors that the network does not need.
    """

    model_types: tuple[str, ...]
    config: Callable[[HFConfig], ModelConfig]
    sources: Callable[[ModelConfig], Sources]
    ignored: tuple[str, ...] = ()
