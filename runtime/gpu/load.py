"""From the folder of an engine for a GPU to its runner; all that can be wrong is found before anything is loaded.

What is wrong with the folder itself is said first, on machines without TensorRT and without a GPU, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hybridtrt.build.engine import ENGINE_FILE, EngineConfig, check_engine_file
from hybridtrt.build.targets import GPU_TARGETS
from hybridtrt.build.tensorrt.backend import backend
from hybridtrt.build.tensorrt.bindings import LOGITS
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.build.tensorrt.target import KERNELS, plugin_calls
from hybridtrt.plugins.gpu.cuda import CudaDriver
from hybridtrt.plugins.gpu.kernel_folder import KernelFolder, check_kernels
from hybridtrt.runtime.gpu.cuda_device import CudaDevice
from hybridtrt.runtime.gpu.device import Device
from hybridtrt.runtime.gpu.input_weights import upload_weights, weights_source
from hybridtrt.runtime.gpu.pools import pool_bytes
from hybridtrt.runtime.gpu.runner import TensorRTRunner, logits_bytes
from hybridtrt.runtime.gpu.staging import array_bytes
from hybridtrt.runtime.gpu.trt_engine import TensorRTEngine
from hybridtrt.runtime.runner import RunnerInfo


def load_tensorrt_runner(engine_dir: Path, config: EngineConfig, info: RunnerInfo) -> TensorRTRunner:
    """Load an engine of a GPU target. Raises `ValueError` with one line for whatever does not fit."""
    about, path, calls = described(engine_dir, config), engine_dir / ENGINE_FILE, plugin_calls(config)
    check_engine_file(engine_dir, config)
    check_kernels(engine_dir / KERNELS, calls, config.build.compute_capabilities)
    weights_source(config, about)
    trt = backend(config.build.target).trt
    check_version(engine_dir, about, trt)
    device = CudaDevice()
    with ExitStack() as undo:
        undo.callback(device.close)
        driver = CudaDriver()
        undo.callback(driver.unload)
        kernels = KernelFolder(engine_dir / KERNELS, device.compute_capability, driver)
        for call in calls:  # now: an error in the middle of a step would be lost in TensorRT
            kernels.launcher(call)
        beside = bytes_beside_engine(config, info)
        check_memory(device, {"engine": engine_bytes(config, path)} | beside)
        engine = TensorRTEngine(trt, path, kernels.launcher, device.stream)
        check_memory(device, {"scratch": engine.scratch_bytes} | beside)  # which the file does not say
        weights = upload_weights(config, about, device)
        runner = TensorRTRunner(info, device, engine, _by_output(about), LOGITS, weights)
        undo.pop_all()
        return runner


def described(engine_dir: Path, config: EngineConfig) -> TensorRTInfo:
    """What `config.json` says of the TensorRT engine."""
    if config.build.target not in GPU_TARGETS or config.tensorrt is None:
        raise ValueError(f"{engine_dir}: config.json describes no TensorRT engine (target {config.build.target})")
    about = config.tensorrt
    if about.cache_outputs.keys() != {cache.name for cache in config.caches()}:
        raise ValueError(f"{engine_dir}: config.json names the outputs of other caches than the model has")
    if (about.checkpoint is not None) != config.build.weights_as_inputs:
        raise ValueError(f"{engine_dir}: weights_as_inputs in config.json does not fit what was built")
    return about


def check_version(engine_dir: Path, about: TensorRTInfo, trt: Any) -> None:
    """Raise `ValueError` for an engine of another TensorRT: engines load in the version that built them."""
    if (about.module, about.version) != (trt.__name__, trt.__version__):
        raise ValueError(
            f"{engine_dir}: the engine was built by {about.module} {about.version}, this is {trt.__name__} "
            f"{trt.__version__}; build it again or install that version"
        )


def engine_bytes(config: EngineConfig, path: Path) -> int:
    """Device memory that TensorRT takes for an engine, with the weights that are constants of it."""
    size = path.stat().st_size
    return size if config.build.weights_as_inputs else max(size, config.weight_bytes())


def bytes_beside_engine(config: EngineConfig, info: RunnerInfo) -> dict[str, int]:
    """Device memory that the runner takes, but for what a step needs as scratch, which the engine says."""
    return {
        **({"weights": config.weight_bytes()} if config.build.weights_as_inputs else {}),
        "pages and states": pool_bytes(info),
        "logits": logits_bytes(info),
        "arrays of a step": sum(array_bytes(info).values()),
    }


def check_memory(device: Device, parts: Mapping[str, int]) -> None:
    """Raise `ValueError`, with the bytes of each part, where all of them do not fit into the device."""
    needed, left = sum(parts.values()), device.free_bytes()
    if needed > left:
        listed = ", ".join(f"{what} {size:,}" for what, size in parts.items())
        raise ValueError(
            f"the engine needs {needed:,} bytes of device memory ({listed}), and {device.name} has {left:,} left: "
            "lower kv_cache_tokens or prefix_cache_bytes, or build for fewer or shorter sequences or smaller steps"
        )


def _by_output(about: TensorRTInfo) -> dict[str, str]:
    return {output: cache for cache, output in about.cache_outputs.items()}
