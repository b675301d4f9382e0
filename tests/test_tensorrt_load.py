"""Loading an engine of a GPU target: what is asked of TensorRT, and every way in which it may not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_device import HostDevice, HostEngine
from networks import checkpoint, config_of

from hybridtrt.build.engine import ENGINE_FILE, EngineConfig
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.build.tensorrt.stored import stored_tensors, weight_bytes
from hybridtrt.build.tensorrt.target import checksum
from hybridtrt.runtime.gpu import load
from hybridtrt.runtime.gpu.input_weights import upload_weights
from hybridtrt.runtime.gpu.load import check_memory, check_version, described
from hybridtrt.runtime.gpu.runner import TensorRTRunner
from hybridtrt.runtime.gpu.staging import array_bytes
from hybridtrt.runtime.gpu.trt_engine import TensorRTContext
from hybridtrt.runtime.load import RuntimeOptions, runner_info

GPU = {"target": "tensorrt-rtx", "activations": "float16", "compute_capabilities": (89,)}


WHOLE = {"module": "a", "version": "1", "cache_outputs": {}, "engine_bytes": 2}


def gpu_config(**options: Any) -> EngineConfig:
    return config_of("qwen3_next", **GPU, **options)


def about(config: EngineConfig, folder: Path | None = None) -> TensorRTInfo:
    """As a build with the weights of a checkpoint as inputs would say."""
    outputs = {cache.name: f"{cache.name}.next" for cache in config.caches()}
    if folder is None:
        return TensorRTInfo("tensorrt_rtx_bindings", "1.7", outputs, 6)
    source = checkpoint("qwen3_next")
    sums = {name: checksum(source.tensor(name)) for name in config.program().weights}
    return TensorRTInfo("tensorrt_rtx_bindings", "1.7", outputs, 6, str(folder), sums)


@pytest.mark.parametrize("weights", [None, "int8", "int4", "fp8"])
def test_weights_come_from_the_checkpoint(weights: str | None) -> None:
    """What lies in device memory are the stored tensors, bit for bit, and as many bytes as the plan counts."""
    config = gpu_config(weights=weights, weights_as_inputs=True, exclude=("layers.0.*", "*.shared.*", "*.experts.down"))
    source, device = checkpoint("qwen3_next"), HostDevice()
    found = upload_weights(config, about(config, source.path), device)
    total = 0
    for name, spec, tensor in stored_tensors(config, source.tensor):
        address, shape = found.pop(name)
        assert shape == spec.shape
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(device.at(address, data.nbytes), data)
        total += data.nbytes
    assert not found
    assert total == config.weight_bytes() == sum(weight_bytes(config).values())
    assert config.memory().weight_bytes == total
    whole = config_of("qwen3_next", **GPU).weight_bytes()
    assert (total < whole) == (weights is not None)


def test_a_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    config, device = gpu_config(weights_as_inputs=True), HostDevice()
    source = checkpoint("qwen3_next")
    info = about(config, source.path)
    name = next(iter(config.program().weights))
    with pytest.raises(ValueError, match=rf"{name} has changed since the engine was built; build the engine again$"):
        upload_weights(config, replace(info, checksums={**(info.checksums or {}), name: 1}), device)
    with pytest.raises(ValueError, match=r"the engine's weights are those of .*/gone, which cannot be read"):
        upload_weights(config, replace(info, checkpoint=str(tmp_path / "gone")), device)
    with pytest.raises(ValueError, match="holds another model than the engine was built from"):
        upload_weights(replace(config, model=replace(config.model, norm_eps=1.0)), info, device)


def test_an_engine_of_another_tensorrt_is_refused() -> None:
    trt = SimpleNamespace(__name__="tensorrt_rtx_bindings", __version__="1.8")
    with pytest.raises(ValueError, match=r"by tensorrt_rtx_bindings 1\.7, this is tensorrt_rtx_bindings 1\.8; build"):
        check_version(Path("e"), about(gpu_config()), trt)
    trt.__version__ = "1.7"
    check_version(Path("e"), about(gpu_config()), trt)
    with pytest.raises(ValueError, match=r"describes no TensorRT engine \(target tensorrt-rtx\)"):
        described(Path("e"), gpu_config())


@pytest.mark.parametrize("as_inputs", [False, True])
def test_device_memory_is_counted_to_the_byte(as_inputs: bool, tmp_path: Path) -> None:
    """What the runner allocates is what was counted before, with the weights of an engine that has none."""
    config = gpu_config(weights_as_inputs=as_inputs)
    info, plan = runner_info(config, RuntimeOptions()), config.memory()
    (tmp_path / ENGINE_FILE).write_bytes(bytes(plan.weight_bytes + 7))
    assert load.engine_bytes(config, tmp_path / ENGINE_FILE) == plan.weight_bytes + 7
    (tmp_path / ENGINE_FILE).write_bytes(bytes(7))
    assert load.engine_bytes(config, tmp_path / ENGINE_FILE) == (7 if as_inputs else plan.weight_bytes)
    program = config.program()
    device = HostDevice()
    engine = HostEngine(device, program, {}, scratch_bytes=1024)
    engine.names |= set(array_bytes(info))
    weights = upload_weights(config, about(config, checkpoint("qwen3_next").path if as_inputs else None), device)
    before = device.free_bytes()
    engine.names |= weights.keys()
    TensorRTRunner(info, device, engine, engine.outputs, weights=weights)
    beside = load.bytes_beside_engine(config, info)
    assert device.memory - device.free_bytes() == sum(beside.values()) + 1024
    assert device.memory - before == beside.get("weights", 0) == plan.weight_bytes * as_inputs
    assert beside["pages and states"] == plan.page_bytes + plan.state_bytes
    assert beside["logits"] == 4 * info.max_logits_rows * info.vocab_size


def test_an_engine_that_does_not_fit_is_refused_with_all_parts() -> None:
    check_memory(HostDevice(memory=10_007), {"engine": 7, "logits": 10_000})
    parts = r"engine needs 10,007 bytes of device memory \(engine 7, logits 10,000\), and host memory has 10,006 left"
    with pytest.raises(ValueError, match=parts):
        check_memory(HostDevice(memory=10_006), {"engine": 7, "logits": 10_000})


class Loading:
    """A folder with an engine and a GPU to load it, both stand-ins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        config = gpu_config()
        self.folder, self.config = folder, replace(config, tensorrt=about(config))
        self.info = runner_info(self.config, RuntimeOptions())
        self.device, self.unloaded, self.scratch = HostDevice(), False, 64
        (folder / "kernels").mkdir()
        (folder / "kernels/manifest.json").write_text('{"compute_capabilities": [89], "calls": {}, "checksums": {}}')
        (folder / ENGINE_FILE).write_bytes(b"engine")
        trt = SimpleNamespace(__name__="tensorrt_rtx_bindings", __version__="1.7")
        monkeypatch.setattr(load, "backend", lambda target: SimpleNamespace(trt=trt))
        monkeypatch.setattr(load, "CudaDevice", lambda: self.device)
        monkeypatch.setattr(load, "CudaDriver", lambda: self)
        monkeypatch.setattr(load, "TensorRTEngine", self.engine)

    def unload(self) -> None:
        self.unloaded = True

    def engine(self, *arguments: Any) -> HostEngine:
        self.device.allocate(1000)  # as TensorRT does
        return HostEngine(self.device, self.config.program(), {}, self.scratch)

    def load(self) -> TensorRTRunner:
        return load.load_tensorrt_runner(self.folder, self.config, self.info)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loading:
    return Loading(monkeypatch, tmp_path)


def test_scratch_is_asked_of_the_engine_and_nothing_stays_where_it_does_not_fit(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "plugin_calls", lambda config: [])
    loading.scratch = 1 << 33
    with pytest.raises(ValueError, match=r"device memory \(scratch 8,589,934,592, pages and states [\d,]+, logits "):
        loading.load()
    assert loading.unloaded
    assert loading.device.free_bytes() == loading.device.memory
    loading.unloaded, loading.scratch = False, 64
    runner = loading.load()
    assert not loading.unloaded
    assert loading.device.free_bytes() < loading.device.memory
    runner.close()
    assert loading.device.free_bytes() == loading.device.memory


def test_kernels_are_loaded_before_the_engine(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT calls plugins in the middle of a step, and what they raise there is lost."""
    monkeypatch.setattr(load, "check_kernels", lambda folder, calls, wanted: None)
    monkeypatch.setattr(load, "TensorRTEngine", None)
    with pytest.raises(ValueError, match=r"kernels: there are no kernels for layers\.0\."):
        loading.load()


class StandIn:
    """An execution context that takes what it is told to, and remembers."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.calls = refuses, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self.calls.append((name, *arguments))
            return name != self.refuses

        return call


def test_a_context_sets_shapes_of_inputs_and_addresses_of_all() -> None:
    logger = SimpleNamespace(errors=["old"], first_error=lambda: "its words")

    def run(context: TensorRTContext) -> None:
        context.bind("input_ids", 256, [3])
        context.execute(7)

    standin = StandIn()
    context = TensorRTContext(standin, frozenset({"input_ids"}), logger)
    context.bind("input_ids", 256, [3])
    context.bind("logits", 512, [3, 9])
    context.execute(7)
    assert standin.calls == [
        ("set_input_shape", "input_ids", (3,)),
        ("set_tensor_address", "input_ids", 256),
        ("set_tensor_address", "logits", 512),
        ("execute_async_v3", 7),
    ]
    assert logger.errors == []
    for refuses, line in (
        ("set_input_shape", r"does not take input_ids in the shape \(3,\): its words"),
        ("set_tensor_address", "does not take the address of input_ids: its words"),
        ("execute_async_v3", "does not run the step: its words"),
    ):
        context = TensorRTContext(StandIn(refuses), frozenset({"input_ids"}), logger)
        with pytest.raises(ValueError, match=line):
            run(context)


@pytest.mark.parametrize(
    "data",
    [
        WHOLE | {"module": 1},
        WHOLE | {"cache_outputs": {"a": 2}},
        WHOLE | {"engine_bytes": "2"},
        WHOLE | {"checkpoint": "b"},
        WHOLE | {"checkpoint": "b", "checksums": {"w": "x"}},
        {"module": "a"},
        WHOLE | {"more": 1},
    ],
)
def test_a_damaged_description(data: dict[str, Any]) -> None:
    TensorRTInfo.from_dict(WHOLE)
    config = gpu_config()
    whole = config.to_dict()
    with pytest.raises(ValueError, match=r"^engine/config\.json: "):
        EngineConfig.from_dict(whole | {"tensorrt": data}, Path("engine/config.json"))


def test_a_description_comes_back() -> None:
    config = gpu_config(weights_as_inputs=True)
    config = replace(config, tensorrt=about(config, checkpoint("qwen3_next").path))
    assert EngineConfig.from_dict(config.to_dict(), Path("config.json")) == config
