"""`pytest -m gpu`: every kernel, the device and its graphs on a real GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_calls import CALLS

FOLDER = Path(__file__).parents[1] / "benchmarks"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The module of the benchmark, which compares kernels with their definitions."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(FOLDER))
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_their_definitions(name: str, seed: int, benchmark: Any) -> None:
    if not benchmark.runs_here(CALLS[name]):
        pytest.skip("this GPU has no FP8")
    right = benchmark.compare(name, CALLS[name], benchmark.NUMERICS["cuda"], "cuda", seed)
    assert right.error <= right.allowed


def test_copies_fills_and_graphs() -> None:
    """What the runner does with the device, in a stream and replayed from a graph."""
    pytest.importorskip("cuda.bindings")
    np = pytest.importorskip("numpy")
    from hybridtrt.runtime.gpu.cuda_device import CudaDevice

    device = CudaDevice()
    data = device.pinned(1024)
    data[:] = np.arange(1024) % 251
    a, b = device.allocate(1024), device.allocate(1024)
    assert a % 256 == b % 256 == 0

    def work() -> None:
        device.upload(a, data)
        device.copy(b, a, 512)
        device.fill(b + 512, 0xFF, 512)

    graph = device.capture(work)
    data[0] = 9
    device.replay(graph)
    back = device.pinned(1024)
    device.download(back, b)
    device.synchronize()
    np.testing.assert_array_equal(back[:512], data[:512])
    assert (back[512:] == 0xFF).all()
    device.close()
