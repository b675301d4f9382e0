"""What a folder holds: a Hugging Face model, a checkpoint or an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridtrt.build.engine import BuildConfig, is_engine, read_engine_config
from hybridtrt.converters.checkpoint import is_checkpoint, load_checkpoint
from hybridtrt.converters.describe import Summary, describe, render
from hybridtrt.converters.memory import MemoryPlan
from hybridtrt.converters.model_reader import read_model_config


@dataclass(frozen=True)
class Report:
    """The kind of folder and its model; limits and memory where it is an engine."""

    kind: str  # model, checkpoint or engine
    summary: Summary
    build_config: BuildConfig | None = None
    memory: MemoryPlan | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data: dict[str, Any] = {"kind": self.kind, **self.summary.to_dict()}
        if self.build_config is not None and self.memory is not None:
            data["build_config"] = asdict(self.build_config)
            data["memory"] = {**asdict(self.memory), "total_bytes": self.memory.total_bytes}
        return data

    def render(self) -> str:
        """The layer table and the totals as text."""
        lines = [render(self.summary)]
        if self.build_config is not None and self.memory is not None:
            limits = ", ".join(f"{name} {value}" for name, value in asdict(self.build_config).items())
            lines += [
                f"build                 {limits}",
                f"memory when full      {self.memory.total_bytes:,} bytes: weights {self.memory.weight_bytes:,} (as "
                f"stored), pages {self.memory.page_bytes:,}, states {self.memory.state_bytes:,}",
            ]
        return "\n".join(lines)


def inspect(folder: str | Path) -> Report:
    """Raises `ValueError` for a folder that is none of the three."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if is_engine(folder):
        config = read_engine_config(folder)
        return Report("engine", describe(config.model), config.build, config.memory())
    if is_checkpoint(folder):
        return Report("checkpoint", describe(load_checkpoint(folder).config))
    return Report("model", describe(read_model_config(folder)))
