"""From an engine to a runner on torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridtrt.build.engine import EngineConfig
from hybridtrt.build.lowering import PackedWeight, stored_as
from hybridtrt.build.packed_file import PackedFile
from hybridtrt.build.packed_tensors import read_part
from hybridtrt.plugins.program import Program
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.torch_runner import TorchRunner


def make_torch_runner(
    config: EngineConfig, packed: PackedFile, info: RunnerInfo, threads: int, walker: str
) -> TorchRunner:
    """The runner that walks the program with the kernels of `walker`, "torch" or "reference"."""
    torch.set_num_threads(threads)
    return TorchRunner(*unpacked(config, packed), info, walker)


def unpacked(config: EngineConfig, packed: PackedFile) -> tuple[Program, dict[str, Tensor]]:
    """The program and its weights as the numbers that an engine's formats stand for.

    A weight that is stored in two formats, as tied embeddings may be, goes by two names.
    """
    program = config.program()
    found: dict[str, tuple[PackedWeight, str]] = {}  # the packed weight and the part of it
    for weight in config.lowered().packed_weights().values():
        found |= {f"{part}@{weight.stored}": (weight, part) for part in weight.parts}
    for i, node in enumerate(program.nodes):
        names = {
            role: f"{weight}@{stored_as(program, config.stored, node, role)}" for role, weight in node.weights.items()
        }
        program.weights |= {names[role]: program.weights[weight] for role, weight in node.weights.items()}
        program.nodes[i] = replace(node, weights=names)
    used = {name for node in program.nodes for name in node.weights.values()}
    program.weights = {name: spec for name, spec in program.weights.items() if name in used}
    return program, {name: read_part(packed.data[found[name][0].name], *found[name]) for name in used}
