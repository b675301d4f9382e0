"""The layer table of a model: what each layer is, what it weighs and what it keeps for each token and sequence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.memory import cache_memory, weight_bytes
from hybridtrt.plugins.caches import CacheSpec

SHARED = "shared"  # what the names of weights begin with that several layers use


@dataclass(frozen=True)
class LayerRow:
    """One layer. `state_bytes` are of one sequence."""

    index: int
    mixer: str
    ffn: str
    parameters: int
    kv_bytes_per_token: int
    state_bytes: int


@dataclass(frozen=True)
class Summary:
    """A model in numbers. `parameters` include the embedding and, unless it is tied, the head."""

    architecture: str
    dtype: str
    parameters: int
    shared_parameters: int  # of the blocks that several layers use
    weight_bytes: int
    layer_kinds: dict[str, int]  # "mixer / ffn" to number of layers
    kv_bytes_per_token: dict[str, int]  # by page group
    state_bytes: int  # of one sequence
    layers: list[LayerRow]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def describe(config: ModelConfig, caches: Sequence[CacheSpec] | None = None) -> Summary:
    """Count the parameters and caches of a model; `caches` are its own in other dtypes."""
    caches = config.caches() if caches is None else caches
    parameters: Counter[str] = Counter()
    for name, spec in config.weight_table().items():
        parameters[_layer_of(name)] += math.prod(spec.shape)
    rows = []
    for i, layer in enumerate(config.layers):
        own = cache_memory([spec for spec in caches if _layer_of(spec.name) == str(i)])
        rows.append(
            LayerRow(
                index=i,
                mixer=layer.mixer_names(),
                ffn=layer.ffn_names(),
                parameters=parameters[str(i)],
                kv_bytes_per_token=sum(own.kv_bytes_per_token.values()),
                state_bytes=own.state_bytes,
            )
        )
    total = cache_memory(caches)
    return Summary(
        architecture=config.architecture,
        dtype=config.dtype,
        parameters=parameters.total(),
        shared_parameters=parameters[SHARED],
        weight_bytes=weight_bytes(config),
        layer_kinds=dict(Counter(f"{row.mixer} / {row.ffn}" for row in rows)),
        kv_bytes_per_token=total.kv_bytes_per_token,
        state_bytes=total.state_bytes,
        layers=rows,
    )


def render(summary: Summary) -> str:
    """The layer table and the totals as text."""
    head = ("layer", "mixer", "ffn", "parameters", "KV bytes/token", "state bytes")
    table: list[tuple[str, ...]] = [head]
    for row in summary.layers:
        numbers = (row.parameters, row.kv_bytes_per_token, row.state_bytes)
        table.append((str(row.index), row.mixer, row.ffn, *(f"{number:,}" for number in numbers)))
    if summary.shared_parameters:
        table.append(("", "shared blocks", "", f"{summary.shared_parameters:,}", "", ""))
    outside = summary.parameters - summary.shared_parameters - sum(row.parameters for row in summary.layers)
    table.append(("", "embedding, final norm, head", "", f"{outside:,}", "", ""))
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.layer_kinds.items())
    kv = ", ".join(f"{group} {size:,}" for group, size in summary.kv_bytes_per_token.items()) or "none"
    lines += [
        "",
        f"architecture          {summary.architecture}, {summary.dtype}",
        f"layers                {len(summary.layers)}: {kinds}",
        f"parameters            {summary.parameters:,} in {summary.weight_bytes:,} bytes",
        f"KV bytes per token    {kv}",
        f"state bytes/sequence  {summary.state_bytes:,}",
    ]
    return "\n".join(lines)


def _layer_of(name: str) -> str:
    """The index in `layers.{i}.…`, `shared` for what several layers use, or nothing for what lies outside of them."""
    parts = name.split(".")
    return parts[1] if parts[0] == "layers" else SHARED if parts[0] == SHARED else ""
