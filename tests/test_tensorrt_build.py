"""Engines for GPUs, built without one: what is in the folder, and that every family has kernels for all it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY
from networks import LIMITS, checkpoint, config_of
from test_gpu_plugins import RecordingDriver

from hybridtrt.build.build import build, default_build_config
from hybridtrt.build.engine import BuildConfig, EngineConfig, read_engine_config
from hybridtrt.build.inspect import inspect
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.build.tensorrt.target import checksum, plugin_calls
from hybridtrt.plugins.gpu.kernel_folder import KernelFolder
from hybridtrt.plugins.gpu.plan import Sizes, plan
from hybridtrt.runtime import verify
from hybridtrt.runtime.gpu import load
from hybridtrt.runtime.load import load_runner

ROOT = Path(__file__).resolve().parent.parent
FAMILY = "qwen3_next"
GPU = {"target": "tensorrt-rtx", "activations": "bfloat16", "kv_cache_dtype": "bfloat16", "compute_capabilities": (89,)}


def build_gpu(folder: Path, **options: Any) -> EngineConfig:
    limits = replace(LIMITS, **{**GPU, **options})
    return build(checkpoint(FAMILY).path, folder, limits, gpu_cache=ROOT / ".cache/gpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "engine"
    build_gpu(folder)
    return folder


@pytest.mark.parametrize("variant", TINY)
def test_every_family_has_kernels_for_its_plugins(variant: str) -> None:
    """At the largest step each launch has programs, and memory for what it needs besides."""
    config = config_of(variant, **GPU)
    for call in plugin_calls(config):
        planned = plan(call)
        sizes = Sizes(T=32, B=4, P=8)
        assert planned.launches
        assert all(size >= 1 for launch in planned.launches for size in launch.grid(sizes))
        assert planned.scratch_places(sizes)[1] < 1 << 24


def test_the_folder_of_an_engine(engine: Path) -> None:
    """TensorRT's engine, the kernels that its plugins launch, and a description of both."""
    config = read_engine_config(engine)
    assert {path.name for path in engine.iterdir()} == {"config.json", "rank0.engine", "kernels"}
    assert config.tensorrt is not None
    assert config.tensorrt.cache_outputs.keys() == {cache.name for cache in config.caches()}
    assert config.tensorrt.checksums is None
    driver = RecordingDriver()
    kernels = KernelFolder(engine / "kernels", 89, driver)
    for call in plugin_calls(config):
        kernels.launcher(call)
    manifest = json.loads((engine / "kernels/manifest.json").read_text())
    listed = {key for by_capability in manifest["calls"].values() for key in by_capability["89"]}
    assert listed == {path.name for path in (engine / "kernels").iterdir() if path.is_dir()}
    assert len(driver.loaded) == sum(len(by_capability["89"]) for by_capability in manifest["calls"].values())


def test_an_engine_of_a_gpu_is_inspected_without_one(engine: Path) -> None:
    report = inspect(engine)
    assert report.memory == read_engine_config(engine).memory()
    assert "target tensorrt-rtx" in report.render()
    assert "compute_capabilities 89" in report.render()


def test_weights_stay_out_of_an_engine_that_takes_them_as_inputs(engine: Path, tmp_path: Path) -> None:
    """It names its checkpoint and the weights' checksums, and is smaller by as much as the weights take."""
    config = build_gpu(tmp_path / "engine", weights_as_inputs=True, weights="int8")
    about = config.tensorrt
    source = checkpoint(FAMILY)
    assert about is not None
    assert about.checkpoint == str(source.path.resolve())
    assert about.checksums == {name: checksum(source.tensor(name)) for name in config.program().weights}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"target": "tensorrt", "compute_capabilities": ()}, r"target tensorrt needs NVIDIA TensorRT 10\.14 or later"),
        (
            {"target": "tensorrt"},
            r"compute_capabilities=\[89\] with target=tensorrt, which builds for the GPU",
        ),
        (
            {"compute_capabilities": (90,)},
            "compute_capability=90 with target=tensorrt-rtx: expected one of 80",
        ),
        ({"compute_capabilities": ()}, "compute_capabilities is empty with target=tensorrt-rtx: expected some of 80"),
        ({"activations": None}, "activations=None with target=tensorrt-rtx: expected one of bfloat16, float16"),
        (
            {"activations": "float32"},
            "activations='float32' with target=tensorrt-rtx: expected one of bfloat16, float16",
        ),
        ({"weights": "float16"}, "weights='float16' with activations='bfloat16': on a GPU they are of one dtype"),
        (
            {"weights": "float32"},
            "weights='float32' with target=tensorrt-rtx: expected one of bfloat16, f",
        ),
        (
            {"weights": "fp8", "compute_capabilities": (80,)},
            "weights='fp8' with compute_capability=80: GPUs have",
        ),
        ({"target": "cpu"}, r"compute_capabilities=\[89\] with target=cpu: expected target tensorrt or tensorrt-rtx"),
        (
            {"weights": "int4"},
            r"groups of 32 do not divide the rows of layers\.\*\..*: choose another group_size or exclude them",
        ),
    ],
)
def test_bad_input_is_one_line(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    """And nothing is left behind."""
    with pytest.raises(ValueError, match=line) as caught:
        build_gpu(tmp_path / "engine", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_defaults_of_a_gpu_target() -> None:
    config = default_build_config(checkpoint(FAMILY).path, "tensorrt-rtx")
    assert (config.activations, config.kv_cache_dtype, config.state_dtype) == ("bfloat16", "bfloat16", "float32")
    assert config.compute_capabilities == (80, 86, 89, 120)
    assert default_build_config(checkpoint(FAMILY).path, "tensorrt-rtx", "float16").kv_cache_dtype == "float16"


def test_without_a_gpu_it_is_not_run(engine: Path) -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, and CUDA finds none here"):
        load_runner(engine)


def test_verify_says_so_before_it_loads_transformers_model(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_load_oracle", lambda folder: pytest.fail("transformers was asked"))
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, and CUDA finds none here"):
        verify.verify(checkpoint(FAMILY).path, engine)


@pytest.mark.parametrize(
    ("files", "kept", "line"),
    [
        ("rank0.engine", None, r"/engine: there is no rank0\.engine in it; build the engine again$"),
        ("rank0.engine", 0, r"/engine/rank0\.engine has 0 bytes; built were [\d,]+: build the engine again$"),
        ("rank0.engine", -1, r"/engine/rank0\.engine has [\d,]+ bytes; built were [\d,]+: build the engine again$"),
        ("kernels/manifest.json", None, r"manifest\.json: the kernels of the engine are missing"),
        ("kernels/*/kernel.json", None, r"the kernel of layers\.0\.\S+ \(\w+\) is missing or damaged$"),
        ("kernels/*/kernel.cubin", -1, r"the kernel of layers\.0\.\S+ \(\w+\) is missing or damaged$"),
    ],
)
def test_what_is_damaged_is_said_without_a_gpu(
    engine: Path, files: str, kept: int | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without TensorRT."""
    monkeypatch.setattr(load, "backend", lambda target: pytest.fail("TensorRT was asked"))
    shutil.copytree(engine, tmp_path / "engine")
    for path in (tmp_path / "engine").glob(files):
        data = path.read_bytes()
        path.unlink()
        if kept is not None:
            path.write_bytes(data[:kept])
    with pytest.raises(ValueError, match=line):
        load_runner(tmp_path / "engine")
    if files == "rank0.engine":
        with pytest.raises(ValueError, match=line):
            inspect(tmp_path / "engine")


@pytest.mark.parametrize(
    ("file", "change", "line"),
    [
        (
            "config.json",
            lambda data: data["build_config"].update(weights_as_inputs=True),
            "not fit what was built$",
        ),
        (
            "config.json",
            lambda data: data["build_config"].update(weights_as_inputs="no"),
            "is not true or false$",
        ),
        ("config.json", lambda data: data["tensorrt"]["cache_outputs"].popitem(), "outputs of other caches than the"),
        (
            "kernels/manifest.json",
            lambda data: data["compute_capabilities"].clear(),
            "no kernels for 89; build",
        ),
    ],
)
def test_what_does_not_fit_together_is_said_without_a_gpu(
    engine: Path, file: str, change: Callable[[Any], object], line: str, tmp_path: Path
) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    path = tmp_path / "engine" / file
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=line):
        load_runner(tmp_path / "engine")


def test_a_gpu_named_twice_has_its_kernels_once() -> None:
    assert BuildConfig(**GPU | {"compute_capabilities": (89, 80, 89)}).compute_capabilities == (89, 80)


@pytest.mark.parametrize("damaged", [None, [], 3, {}, {"module": "a", "version": "1", "cache_outputs": 3}, {"more": 1}])
def test_a_damaged_description_is_one_clear_line(damaged: Any) -> None:
    with pytest.raises(ValueError, match=r'damaged .*"tensorrt".*build the engine again'):
        TensorRTInfo.from_dict(damaged)


@pytest.mark.parametrize("damaged", [89, "89", [[89]], ["89"], None])
def test_capabilities_that_are_no_list_of_numbers_are_named(damaged: Any) -> None:
    with pytest.raises(ValueError, match=r"compute_capabilities=.* is not a list of whole numbers"):
        BuildConfig(**GPU | {"compute_capabilities": damaged})


def test_without_triton_it_says_what_to_install() -> None:
    """As after an installation for the CPU alone."""
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, sys.argv[1]); from gpu_calls import CALLS;"
        "from hybridtrt.plugins.gpu.plan import plan; plan(CALLS['conv_float32'])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(ROOT / "tests")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("ValueError: kernels for GPUs need the package triton, which is not installed: ./scripts")
