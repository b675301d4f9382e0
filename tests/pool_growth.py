"""Prints the bytes that the pools of a hybrid model were planned to take, and those that the process grew by."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np

from hybridtrt.build.engine import BuildConfig, EngineConfig
from hybridtrt.build.packed_file import stored_bytes
from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.load import RuntimeOptions, runner_info


def empty_runner(config: EngineConfig) -> CpuRunner:
    """A runner whose weights are all zero."""
    packed = config.lowered().packed_weights()
    weights = {name: np.zeros(stored_bytes(weight), np.uint8) for name, weight in packed.items()}
    return CpuRunner(config.program(), config.lowered, weights, runner_info(config, RuntimeOptions()), threads=1)


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


def fill(runner: CpuRunner) -> None:
    """Touch every byte of the pools."""
    runner.poison({group: range(count) for group, count in runner.info.num_pages.items()}, range(runner.info.num_slots))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print_growth()
