"""What a folder holds: a Hugging Face model, a checkpoint or an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridtrt.build.engine import (
    CONFIG_FILE,
    BuildConfig,
    EngineConfig,
    check_engine_file,
    is_engine,
    read_engine_config,
)
from hybridtrt.build.lowering import PackedWeight, stored_as
from hybridtrt.build.packed_file import used_bytes
from hybridtrt.build.tactics import Tuned
from hybridtrt.build.targets import CPU
from hybridtrt.converters.checkpoint import is_checkpoint, load_checkpoint
from hybridtrt.converters.describe import Summary, describe, render
from hybridtrt.converters.memory import GroupPool, MemoryPlan
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.plugins.program import Node, Program
from hybridtrt.plugins.spec import Load


@dataclass(frozen=True)
class Report:
    """The kind of folder and its model; limits and memory where it is an engine."""

    kind: str  # model, checkpoint or engine
    summary: Summary
    build_config: BuildConfig | None = None
    memory: MemoryPlan | None = None
    tuned: Tuned | None = None
    decode_flops: int = 0  # of one token at batch 1, without attention to the past
    decode_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data: dict[str, Any] = {"kind": self.kind, **self.summary.to_dict()}
        if self.build_config is not None and self.memory is not None:
            data["build_config"] = asdict(self.build_config)
            data["memory"] = {**asdict(self.memory), "total_bytes": self.memory.total_bytes}
            data["decode"] = {"flops_per_token": self.decode_flops, "bytes_per_token": self.decode_bytes}
            if self.tuned is not None:
                data["tactics"] = self.tuned.to_dict()
        return data

    def render(self) -> str:
        """The layer table and the totals as text."""
        lines = [render(self.summary)]
        if self.build_config is not None and self.memory is not None:
            lines += [
                f"build                 {self.build_config.render()}",
                f"memory when full      {self.memory.total_bytes:,} bytes: weights {self.memory.weight_bytes:,} (as "
                f"stored), pages {self.memory.page_bytes:,}, states {self.memory.state_bytes:,} in "
                f"{self.memory.num_slots:,} slots",
                *(_pages(name, pool) for name, pool in self.memory.groups.items()),
                *self._tactics(),
                f"one decoded token     {self.decode_flops:,} operations, {self.decode_bytes:,} bytes read and written",
            ]
        return "\n".join(lines)

    def _tactics(self) -> list[str]:
        if self.build_config is None or self.build_config.target != CPU:
            return []
        return [f"kernel tactics        {'the defaults' if self.tuned is None else self.tuned.render()}"]


def _pages(name: str, pool: GroupPool) -> str:
    kept = "" if pool.window is None else f" for a window of {pool.window:,} tokens"
    kept += "" if pool.limit is None else f" for the first {pool.limit:,} tokens"
    most = f"at most {pool.pages_per_sequence:,} a sequence{kept}"
    return f"pages                 {name} {pool.num_pages:,}, {most}: {pool.num_bytes:,} bytes"


def inspect(folder: str | Path) -> Report:
    """Raises `ValueError` for a folder that is none of the three, or an engine that is not whole."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if is_engine(folder) or _describes_engine(folder / CONFIG_FILE):
        config = read_engine_config(folder)
        check_engine_file(folder, config)
        program, load = config.program(), Load(tokens=1, sequences=1, logits_rows=1, attended=1)
        stored = _stored_bytes(config, program)
        return Report(
            "engine",
            describe(config.model, config.caches()),
            config.build,
            config.memory(),
            config.tuned,
            sum(program.flops(node, load) for node in program.nodes),
            sum(program.bytes_moved(node, load, stored) for node in program.nodes),
        )
    if is_checkpoint(folder):
        return Report("checkpoint", describe(load_checkpoint(folder).config))
    return Report("model", describe(read_model_config(folder)))


def _describes_engine(path: Path) -> bool:
    """Whether a `config.json` is an engine's."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "build_config" in data


def _stored_bytes(config: EngineConfig, program: Program) -> Callable[[Node, str], int]:
    """Bytes of a node's weight by its role."""
    if config.build.target != CPU:
        from hybridtrt.build.tensorrt.stored import weight_bytes

        on_gpu = weight_bytes(config)
        return lambda node, role: on_gpu[node.weights[role]]

    def packed(node: Node, role: str) -> int:
        name = node.weights[role]
        shape = tuple(int(dim) for dim in program.weights[name].shape)
        kept = stored_as(program, config.stored, node, role)
        return used_bytes(PackedWeight((name,), kept, (shape[0],), shape))

    return packed
