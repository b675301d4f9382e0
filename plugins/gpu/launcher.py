"""A call's launches from machine code: pointers in, launches into a stream. TensorRT's plugins run through it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.compile import ALIGNMENT, Compiled
from hybridtrt.plugins.gpu.plan import Sizes, plan

_WARP = 32
_SIZES = frozenset(Sizes._fields)


class Driver(Protocol):
    """What loads and launches kernels: `CudaDriver`, or in tests something that records."""

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> int: ...

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[ctypes.c_void_p | ctypes.c_int32],
    ) -> None: ...


class Launcher:
    """The kernels of one call on one GPU, compiled before in the order of the plan's launches."""

    def __init__(self, call: Call, kernels: Sequence[Compiled], driver: Driver) -> None:
        """Raises `ValueError` where the kernels are not those of the call's launches."""
        self._plan, self._kernels, self._driver = plan(call), tuple(kernels), driver
        wanted = [launch.name for launch in self._plan.launches]
        if [kernel.kernel for kernel in kernels] != wanted:
            raise ValueError(f"{call.name}: kernels {[kernel.kernel for kernel in kernels]} are not {wanted}")
        self._functions = [driver.load(kernel.cubin, kernel.entry, kernel.shared_bytes) for kernel in kernels]

    def scratch_bytes(self, sizes: Sizes) -> int:
        """Memory that a step of these sizes needs besides operands and results."""
        return self._plan.scratch_places(sizes)[1]

    def launch(self, pointers: Mapping[str, int], sizes: Sizes, scratch: int, stream: int) -> None:
        """Launch everything that the step needs.

        `pointers` holds the address of every operand and result by its name, `scratch` is that of `scratch_bytes`.
        Raises `ValueError` for an address that is not aligned as the kernels were promised.
        """
        places, _ = self._plan.scratch_places(sizes)
        addresses = {**pointers, **{name: scratch + place for name, place in places.items()}}
        for name, address in addresses.items():
            if address % ALIGNMENT:
                raise ValueError(f"{name} at {address:#x} is not aligned to {ALIGNMENT} bytes")
        for item, kernel, function in zip(self._plan.launches, self._kernels, self._functions, strict=True):
            if not item.runs(sizes):
                continue
            x, y, z = (*(int(size) for size in item.grid(sizes)), 1, 1)[:3]
            arguments: list[ctypes.c_void_p | ctypes.c_int32] = [
                ctypes.c_int32(getattr(sizes, name)) if name in _SIZES else ctypes.c_void_p(addresses[name])
                for name in kernel.arguments
            ]
            arguments += [ctypes.c_void_p(None)] * 2  # scratch and profile of the compiler, which these kernels lack
            threads = kernel.num_warps * _WARP
            self._driver.launch(function, (x, y, z), threads, kernel.shared_bytes, stream, arguments)
