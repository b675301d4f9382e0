"""The files of an engine for a GPU: TensorRT's engine and the kernels of its plugins."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from hybridtrt.build.engine import ENGINE_FILE, EngineConfig
from hybridtrt.build.tensorrt.backend import backend
from hybridtrt.build.tensorrt.builder import EngineBuilder, EngineRequest
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.build.tensorrt.network import Lowering
from hybridtrt.build.tensorrt.stored import dtypes_of, quantizations_of, stored_weights
from hybridtrt.build.tensorrt.weights import on_stored
from hybridtrt.converters.checkpoint import Checkpoint
from hybridtrt.plugins.call import Call, call_of
from hybridtrt.plugins.gpu.cuda import device_capability
from hybridtrt.plugins.gpu.kernel_folder import write_kernels
from hybridtrt.plugins.gpu.plan import PLUGINS, Sizes, plan

KERNELS = "kernels"
TIMINGS = "tensorrt-timings"  # TensorRT-RTX has none: it chooses its kernels where it runs
Stages = Callable[[str, int, int], None]  # what is being done, steps done, steps


def plugin_calls(config: EngineConfig) -> list[Call]:
    """The calls of all plugins. Raises `ValueError`, naming the node, for sizes that no kernel supports."""
    program, dtypes, stored = config.program(), dtypes_of(config), stored_weights(config)
    nodes = [node for node in program.nodes if node.op in PLUGINS]
    calls = [on_stored(call_of(program, node, config.build.tokens_per_block, dtypes.of), stored) for node in nodes]
    for call in calls:
        plan(call)
    return calls


def lowering_of(config: EngineConfig, checkpoint: Checkpoint) -> Lowering:
    """How the program of an engine becomes a network."""
    limits = config.build
    pages = -(-limits.max_seq_len // limits.tokens_per_block)
    largest = Sizes(T=limits.max_num_tokens, B=limits.max_batch_size, P=pages)
    return Lowering(
        dtypes_of(config),
        limits.tokens_per_block,
        lambda call: plan(call).scratch_places(largest)[1],
        quantizations_of(config),
        None if limits.weights_as_inputs else checkpoint.tensor,
    )


def write_engine(
    folder: Path,
    config: EngineConfig,
    checkpoint: Checkpoint,
    stages: Stages = lambda what, done, total: None,
    cache: Path | None = None,
) -> TensorRTInfo:
    """Build for the GPUs that `config` names, and write to `folder`. `cache` keeps compiled kernels and timings.

    Raises `ValueError` where that TensorRT is not installed, for sizes that no kernel supports and where TensorRT does
    not build the network.
    """
    calls = plugin_calls(config)
    chosen = backend(config.build.target)
    capabilities = config.build.compute_capabilities or (device_capability(),)
    request = EngineRequest(
        program=config.program(),
        lowering=lowering_of(config, checkpoint),
        limits=config.build,
        pools=config.memory(),
        compute_capabilities=config.build.compute_capabilities,
        timing_cache=None if cache is None or config.build.target == "tensorrt-rtx" else cache / TIMINGS,
    )
    write_kernels(folder / KERNELS, calls, capabilities, cache, lambda done, total: stages("kernels", done, total))
    bindings = EngineBuilder(chosen).build(request, folder / ENGINE_FILE, stages)
    checksums = None
    if config.build.weights_as_inputs:
        names = list(config.program().weights)
        checksums = {}
        for i, name in enumerate(names, 1):
            checksums[name] = checksum(checkpoint.tensor(name))
            stages("checksums", i, len(names))
    source = None if checksums is None else str(checkpoint.path.resolve())
    size = (folder / ENGINE_FILE).stat().st_size
    return TensorRTInfo(chosen.trt.__name__, chosen.trt.__version__, bindings.cache_outputs, size, source, checksums)


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of a weight's bytes."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
