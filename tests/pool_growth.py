"""Prints the bytes that the pools of a hybrid model were planned to take, and those that the process grew by."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import torch

from hybridtrt.build.engine import BuildConfig, EngineConfig
from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig
from hybridtrt.runtime.load import RuntimeOptions, runner_info
from hybridtrt.runtime.torch_runner import TorchRunner


def empty_runner(config: EngineConfig) -> TorchRunner:
    """A runner whose weights are all zero."""
    program = config.program()
    weights = {name: torch.zeros([int(dim) for dim in spec.shape]) for name, spec in program.weights.items()}
    return TorchRunner(program, weights, runner_info(config, RuntimeOptions()))


def print_growth() -> None:
    """Bytes of the plan of a hybrid model with windows, and by how many the process grows with its runner."""
    mlp, full = MlpConfig(8), AttentionConfig(4, 4, 64, scale=0.1)
    mixers = [full, replace(full, window=100), GatedDeltaConfig(8, 8, 64, 64, conv_width=4)]
    layers = tuple(LayerConfig((Block((mixer,)), Block((mlp,)))) for mixer in mixers)
    config = EngineConfig(ModelConfig("free", 8, 8, 1 << 20, 1e-6, layers), BuildConfig("cpu", 128, 512, 512, 16))
    small = EngineConfig(config.model, BuildConfig("cpu", 1, 1, 1, 1))
    fill(empty_runner(small))  # what the first runner of a process takes besides
    before, runner = resident_bytes(), empty_runner(config)
    fill(runner)
    plan = config.memory()
    print(plan.page_bytes + plan.state_bytes, resident_bytes() - before)


def fill(runner: TorchRunner) -> None:
    """Touch every byte of the pools."""
    runner.poison({group: range(count) for group, count in runner.info.num_pages.items()}, range(runner.info.num_slots))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print_growth()
