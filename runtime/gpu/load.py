"""From the folder of an engine for a GPU to its runner; all that can be wrong is found before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridtrt.build.engine import ENGINE_FILE, EngineConfig
from hybridtrt.build.targets import GPU_TARGETS
from hybridtrt.build.tensorrt.backend import backend
from hybridtrt.build.tensorrt.bindings import LOGITS
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.build.tensorrt.target import KERNELS, plugin_calls
from hybridtrt.plugins.gpu.cuda import CudaDriver
from hybridtrt.plugins.gpu.kernel_folder import KernelFolder
from hybridtrt.runtime.gpu.cuda_device import CudaDevice
from hybridtrt.runtime.gpu.device import Device
from hybridtrt.runtime.gpu.input_weights import upload_weights
from hybridtrt.runtime.gpu.pools import pool_bytes
from hybridtrt.runtime.gpu.runner import TensorRTRunner
from hybridtrt.runtime.gpu.trt_engine import TensorRTEngine
from hybridtrt.runtime.runner import RunnerInfo


def load_tensorrt_runner(engine_dir: Path, config: EngineConfig, info: RunnerInfo) -> TensorRTRunner:
    """Load an engine of a GPU target. Raises `ValueError` with one line for whatever does not fit."""
    about = described(engine_dir, config)
    trt = backend(config.build.target).trt
    check_version(engine_dir, about, trt)
    device = CudaDevice()
    try:
        kernels = KernelFolder(engine_dir / KERNELS, device.compute_capability, CudaDriver())
        for call in plugin_calls(config):  # now: an error in the middle of a step would be lost in TensorRT
            kernels.launcher(call)
        path = engine_dir / ENGINE_FILE
        if not path.is_file():
            raise ValueError(f"{engine_dir}: there is no {ENGINE_FILE} in it")
        check_memory(device, config, info, path.stat().st_size)
        engine = TensorRTEngine(trt, path, kernels.launcher, device.stream)
        weights = upload_weights(config, about, device)
        return TensorRTRunner(info, device, engine, _by_output(about), LOGITS, weights)
    except BaseException:
        device.close()
        raise


def described(engine_dir: Path, config: EngineConfig) -> TensorRTInfo:
    """What `config.json` says of the TensorRT engine."""
    if config.build.target not in GPU_TARGETS or config.tensorrt is None:
        raise ValueError(f"{engine_dir}: config.json describes no TensorRT engine (target {config.build.target})")
    return config.tensorrt


def check_version(engine_dir: Path, about: TensorRTInfo, trt: Any) -> None:
    """Raise `ValueError` for an engine of another TensorRT: engines load in the version that built them."""
    if (about.module, about.version) != (trt.__name__, trt.__version__):
        raise ValueError(
            f"{engine_dir}: the engine was built by {about.module} {about.version}, this is {trt.__name__} "
            f"{trt.__version__}; build it again or install that version"
        )


def check_memory(device: Device, config: EngineConfig, info: RunnerInfo, engine_bytes: int) -> None:
    """Raise `ValueError`, with the plan's numbers, where weights, pools and logits do not fit into the device."""
    parts = {
        "weights": max(engine_bytes, config.weight_bytes()),
        "pages and states": pool_bytes(info),
        "logits": 4 * info.max_num_tokens * info.vocab_size,
    }
    needed, left = sum(parts.values()), device.free_bytes()
    if needed > left:
        listed = ", ".join(f"{what} {size:,}" for what, size in parts.items())
        raise ValueError(
            f"the engine needs {needed:,} bytes of device memory ({listed}), and {device.name} has {left:,} left: "
            "lower kv_cache_tokens or prefix_cache_bytes, or build for fewer or shorter sequences"
        )


def _by_output(about: TensorRTInfo) -> dict[str, str]:
    return {output: cache for cache, output in about.cache_outputs.items()}
