"""What a family of models is: how its `config.json` reads and where its weights lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridtrt.converters.config import ModelConfig, RopeConfig
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


def default_rope(hf: HFConfig, head_dim: int, partial: float | None = None) -> RopeConfig:
    """Plain rotary embedding; `partial` is the class's default of `partial_rotary_factor`, None if it is not read.

    Reads `rope_parameters` or `rope_scaling` first, then the same keys at the top, as transformers does. Raises
    `ValueError` for any rope type but `default`.
    """
    rope = hf.section("rope_scaling", "rope_parameters")
    if "rope_type" not in rope.values and "type" in rope.values:
        rope.choice("type", None, ("default",))
    else:
        rope.choice("rope_type", "default", ("default",))
    theta = (rope if "rope_theta" in rope.values else hf).number("rope_theta", 10000.0, positive=True)
    if partial is None:
        rotary_dim = head_dim
    else:
        factor = (rope if "partial_rotary_factor" in rope.values else hf).number("partial_rotary_factor", partial)
        rotary_dim = int(head_dim * factor)
        if not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"partial_rotary_factor={factor}: expected a part of head_dim={head_dim} in (0, 1] ({hf.source})"
            )
    if rotary_dim % 2:
        raise ValueError(f"{rotary_dim} rotary channels of head_dim={head_dim}: expected an even number ({hf.source})")
    return RopeConfig(tuple(float(theta ** (-i / rotary_dim)) for i in range(0, rotary_dim, 2)))
