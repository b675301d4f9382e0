"""Modules and launches of the CUDA driver, through its C interface: what a cubin needs and PyTorch does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_LIMIT = 48 << 10  # shared memory that needs no opting in


class CudaDriver:
    """Functions of libcuda. A context must be current, as it is wherever PyTorch or TensorRT has used the device."""

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> int:
        """The function `entry` of a cubin, allowed to use `shared_bytes`. Raises `ValueError` where that fails."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if shared_bytes > _STATIC_LIMIT:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        return int(function.value or 0)

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[ctypes.c_void_p | ctypes.c_int32],
    ) -> None:
        """Put one launch into a stream. Raises `ValueError` with the driver's words where it is refused."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        where = (ctypes.c_void_p(function), *grid, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream))
        self._call("cuLaunchKernel", *where, pointers, None)

    @cached_property
    def _library(self) -> Any:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise ValueError("there is no NVIDIA driver here (libcuda.so.1): kernels need a GPU") from None
        if library.cuInit(0):
            raise ValueError("the NVIDIA driver found no GPU that it can use (cuInit failed)")
        return library

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise ValueError(f"{name} failed: {(text.value or b'').decode() or f'error {status}'}")
