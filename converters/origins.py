"""Where every weight of a conversion comes from, as text: canonical name, transform and tensors of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from hybridtrt.converters.checkpoint import weight_layouts
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.sources import Named, Source

SHOWN_PARTS = 3  # of a long list of parts; the others are counted
SHOWN_VALUES = 8


@dataclass(frozen=True)
class Origin:
    """One canonical weight: how it is stored, and the expression over checkpoint tensors that fills it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    transform: str
    tensors: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def weight_origins(config: ModelConfig, sources: Mapping[str, Source]) -> list[Origin]:
    """Every weight of the network in network order."""
    return [
        Origin(
            name=name,
            shape=layout.shape,
            dtype=layout.dtype,
            transform=transform(sources[name]),
            tensors=tuple(dict.fromkeys(tensor for tensor, _ in sources[name].tensors(layout.shape))),
        )
        for name, layout in weight_layouts(config).items()
    ]


def render_origins(origins: list[Origin]) -> str:
    """One line a weight: `name [shape] dtype <- transform`."""
    return "\n".join(f"{origin.name} {list(origin.shape)} {origin.dtype} <- {origin.transform}" for origin in origins)


def transform(source: Any) -> str:
    """An expression as text: a tensor is its name, a transform `kind(parts, option=value)`."""
    if isinstance(source, Named):
        return source.name
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(source).__name__).lower()
    return f"{kind}({', '.join(_arguments(source))})"


def _arguments(source: Any) -> list[str]:
    shown: list[str] = []
    for field in fields(source):
        value = getattr(source, field.name)
        if is_dataclass(value):
            shown.append(transform(value))
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            shown += _parts(value)
        elif field.name == "name":
            shown.append(value)
        elif value != field.default:
            shown.append(f"{field.name}={_option(value)}")
    return shown


def _option(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(list(value)) if len(value) <= SHOWN_VALUES else f"[{value[0]}, … {len(value) - 1} more …]"


def _parts(parts: tuple[Any, ...]) -> list[str]:
    if len(parts) <= SHOWN_PARTS:
        return [transform(part) for part in parts]
    return [transform(parts[0]), f"… {len(parts) - 2} more …", transform(parts[-1])]
