"""Calls of the CUDA runtime and driver, through NVIDIA's own bindings, with failures as one clear line."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

_STATIC_SHARED_BYTES = 48 << 10  # shared memory that needs no opting in


def bindings() -> tuple[Any, Any]:
    """The modules `cuda.bindings.runtime` and `.driver`. Raises `ValueError` where they are not installed."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError:
        raise ValueError(
            "the package cuda-bindings is not installed; pip install 'hybridtrt[gpu]' installs it"
        ) from None
    return runtime, driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """What a call returned behind its status: nothing, one value or a tuple. Raises `ValueError` with CUDA's words."""
    status, *values = result
    if int(status):
        raise ValueError(f"{what} failed: {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values) or None


def device_capability(ordinal: int = 0) -> int:
    """The compute capability of a GPU, as 89 for 8.9. Raises `ValueError` where there is none."""
    runtime, _ = bindings()
    status, count = runtime.cudaGetDeviceCount()
    if int(status) or ordinal >= count:
        raise ValueError(f"there is no NVIDIA GPU here ({status.name})")
    properties = checked(runtime.cudaGetDeviceProperties(ordinal), f"asking GPU {ordinal}")
    return 10 * int(properties.major) + int(properties.minor)


class CudaDriver:
    """Loads and launches kernels from cubins on the current device."""

    def __init__(self) -> None:
        """Raises `ValueError` without NVIDIA's driver or without a GPU."""
        runtime, self._driver = bindings()
        checked(runtime.cudaFree(0), "making a CUDA context")
        self._modules: list[Any] = []

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> int:
        """The function `entry` of a cubin, allowed to use so much shared memory a block."""
        driver = self._driver
        module = checked(driver.cuModuleLoadData(cubin), f"loading {entry}")
        self._modules.append(module)
        function = checked(driver.cuModuleGetFunction(module, entry.encode()), f"finding {entry}")
        if shared_bytes > _STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(
                driver.cuFuncSetAttribute(function, attribute, shared_bytes), f"{entry}: {shared_bytes} shared bytes"
            )
        return int(function)

    def unload(self) -> None:
        """Free all kernels; none of them may run any more."""
        while self._modules:
            self._driver.cuModuleUnload(self._modules.pop())

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[ctypes.c_void_p | ctypes.c_int32],
    ) -> None:
        """Put one launch into a stream."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        where = (*grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0)
        checked(self._driver.cuLaunchKernel(function, *where), f"a launch of {grid} blocks")
