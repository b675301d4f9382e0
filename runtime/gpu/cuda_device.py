"""An NVIDIA GPU through the CUDA runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hybridtrt.plugins.gpu.cuda import bindings, checked
from hybridtrt.runtime.gpu.device import Bytes


class _Pinned:
    """Page-locked host memory, freed with the last array over it."""

    def __init__(self, cuda: Any, size: int) -> None:
        self._cuda = cuda
        self._address = checked(cuda.cudaMallocHost(max(size, 1)), f"locking {size:,} bytes of host memory")
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (self._address, False)}

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._cuda.cudaFreeHost(self._address)


class CudaDevice:
    """Implements `Device` on one GPU, with a stream of its own."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises `ValueError` where there is no such GPU or no driver for one."""
        self._cuda, _ = bindings()
        status, count = self._cuda.cudaGetDeviceCount()
        if int(status) or ordinal >= count:
            raise ValueError(
                f"a TensorRT engine needs an NVIDIA GPU, and CUDA finds none here ({status.name}); "
                "build with --target cpu to run on this machine"
            )
        checked(self._cuda.cudaSetDevice(ordinal), f"choosing GPU {ordinal}")
        properties = checked(self._cuda.cudaGetDeviceProperties(ordinal), f"asking GPU {ordinal}")
        self.name: str = properties.name.decode()
        self.compute_capability = 10 * int(properties.major) + int(properties.minor)
        self._stream = checked(self._cuda.cudaStreamCreate(), "making a stream")
        self._held: list[int] = []
        self._graphs: list[Any] = []

    @property
    def stream(self) -> int:
        return int(self._stream)

    def free_bytes(self) -> int:
        free, _ = checked(self._cuda.cudaMemGetInfo(), "asking for free memory")
        return int(free)

    def allocate(self, size: int) -> int:
        address = checked(self._cuda.cudaMalloc(max(size, 1)), f"allocating {size:,} bytes of device memory")
        self._held.append(address)
        return int(address)

    def pinned(self, size: int) -> Bytes:
        return np.asarray(_Pinned(self._cuda, size))

    def upload(self, target: int, source: Bytes) -> None:
        self._copy(target, source.ctypes.data, source.nbytes)

    def download(self, target: Bytes, source: int) -> None:
        self._copy(target.ctypes.data, source, target.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size)

    def fill(self, target: int, byte: int, size: int) -> None:
        checked(self._cuda.cudaMemsetAsync(target, byte, size, self._stream), f"setting {size:,} bytes")

    def capture(self, work: Callable[[], None]) -> Any:
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(self._cuda.cudaStreamBeginCapture(self._stream, mode), "starting to capture")
        try:
            work()
        finally:
            result = self._cuda.cudaStreamEndCapture(self._stream)
        graph = checked(result, "capturing a graph")
        self._graphs.append(checked(self._cuda.cudaGraphInstantiate(graph, 0), "making a graph"))
        self._cuda.cudaGraphDestroy(graph)
        return self._graphs[-1]

    def replay(self, graph: Any) -> None:
        checked(self._cuda.cudaGraphLaunch(graph, self._stream), "running a graph")

    def synchronize(self) -> None:
        checked(self._cuda.cudaStreamSynchronize(self._stream), "a step")

    def close(self) -> None:
        if self._stream is None:
            return
        self._cuda.cudaStreamSynchronize(self._stream)
        for graph in self._graphs:
            self._cuda.cudaGraphExecDestroy(graph)
        for address in self._held:
            self._cuda.cudaFree(address)
        self._cuda.cudaStreamDestroy(self._stream)
        self._graphs.clear()
        self._held.clear()
        self._stream = None

    def _copy(self, target: int, source: int, size: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        checked(self._cuda.cudaMemcpyAsync(target, source, size, kind, self._stream), f"copying {size:,} bytes")
