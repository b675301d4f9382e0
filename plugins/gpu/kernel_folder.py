"""The kernels of an engine as files: a folder for each kernel, and a manifest that says which ones a call launches."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.compile import Compiled, compile_calls, load_kernel, save_kernel
from hybridtrt.plugins.gpu.launcher import Driver, Launcher

MANIFEST = "manifest.json"


def write_kernels(
    folder: Path,
    calls: Sequence[Call],
    compute_capabilities: Sequence[int],
    cache: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compile what the calls launch for each compute capability and write it to a new folder.

    Calls that differ in names alone share their kernels. Raises `ValueError` as `compile_calls` does.
    """
    unique = list({call.key: call for call in calls}.values())
    made = compile_calls(unique, compute_capabilities, cache, progress=progress)
    folder.mkdir()
    listed: dict[str, dict[str, list[str]]] = {}
    checksums = {}
    for call, kernels in zip(unique, made, strict=True):
        by_capability = listed.setdefault(call.key, {str(number): [] for number in compute_capabilities})
        for kernel in kernels:
            by_capability[str(kernel.compute_capability)].append(kernel.key)
            checksums[kernel.key] = zlib.crc32(kernel.cubin)
            save_kernel(kernel, folder / kernel.key)
    data = {"compute_capabilities": list(compute_capabilities), "calls": listed, "checksums": checksums}
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


class KernelFolder:
    """The kernels of an engine for one compute capability, each loaded once."""

    def __init__(self, folder: Path, compute_capability: int, driver: Driver) -> None:
        """Raises `ValueError` for a folder that is damaged or has no kernels for this compute capability."""
        capabilities, calls, self._checksums = _manifest(folder / MANIFEST)
        if compute_capability not in capabilities:
            known = ", ".join(map(str, capabilities))
            raise ValueError(
                f"{folder}: there are kernels for compute capability {known}, not for {compute_capability}, which this "
                "GPU has; build the engine with --compute-capability"
            )
        self._calls = {key: kernels[str(compute_capability)] for key, kernels in calls.items()}
        self._folder, self._driver = folder, driver
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, call: Call) -> Launcher:
        """What launches a call. Raises `ValueError`, naming it, where its kernels are not in the folder."""
        if call.key not in self._launchers:
            self._launchers[call.key] = Launcher(call, self._kernels(call), self._driver)
        return self._launchers[call.key]

    def _kernels(self, call: Call) -> list[Compiled]:
        if call.key not in self._calls:
            raise ValueError(f"{self._folder}: there are no kernels for {call.name} ({call.op})")
        found = []
        for key in self._calls[call.key]:
            kernel = load_kernel(self._folder / key)
            if kernel is None or zlib.crc32(kernel.cubin) != self._checksums.get(key):
                raise ValueError(f"{self._folder / key}: the kernel of {call.name} ({call.op}) is missing or damaged")
            found.append(kernel)
        return found


class _NoDriver:
    """Takes kernels without a GPU, and launches none."""

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> int:
        return 0

    def launch(self, *arguments: Any) -> None:
        raise RuntimeError("these kernels were not loaded")


def check_kernels(folder: Path, calls: Sequence[Call], wanted: Sequence[int] = ()) -> None:
    """Raise `ValueError` where the kernels of a call are missing or damaged, for whichever GPU, or for one `wanted`."""
    capabilities, _, _ = _manifest(folder / MANIFEST)
    missing = [number for number in wanted if number not in capabilities]
    if missing or not capabilities:
        listed = ", ".join(map(str, missing)) or "any compute capability"
        raise ValueError(f"{folder / MANIFEST} is damaged: there are no kernels for {listed}; build the engine again")
    for capability in capabilities:
        kernels = KernelFolder(folder, capability, _NoDriver())
        for call in calls:
            kernels.launcher(call)


def _manifest(path: Path) -> tuple[list[int], dict[str, dict[str, list[str]]], dict[str, int]]:
    """Compute capabilities, the kernels of each call for each of them, and the CRC-32 of each kernel's machine code."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        capabilities = [int(number) for number in data["compute_capabilities"]]
        calls = {
            str(key): {str(number): [str(name) for name in kernels[str(number)]] for number in capabilities}
            for key, kernels in data["calls"].items()
        }
        checksums = {str(key): int(number) for key, number in data["checksums"].items()}
    except OSError as error:
        raise ValueError(f"{path}: the kernels of the engine are missing ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    return capabilities, calls, checksums
