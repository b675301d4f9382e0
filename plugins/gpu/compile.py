"""Kernels to machine code without a GPU: cubins for a compute capability, cached by what they are made of.

Compilation runs in processes of its own, one a core: it takes seconds a kernel, and a process in which kernels are
interpreted cannot compile them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.plan import Launch, Plan, plan

log = logging.getLogger("hybridtrt.plugins.gpu")

COMPUTE_CAPABILITIES = (80, 86, 89, 90, 100, 120)
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a block may have
TENSOR_MEMORY = 512  # columns a block may have
MATRIX_INSTRUCTIONS = ("wgmma", "tcgen05.mma", "mma.sync")
ALIGNMENT = 16  # bytes, of every pointer that a kernel gets


@dataclass(frozen=True)
class Compiled:
    """One kernel for one compute capability. `arguments` names what it takes, then follow two null pointers."""

    kernel: str
    compute_capability: int
    key: str  # of all that went into it
    arguments: tuple[str, ...]
    entry: str
    num_warps: int
    shared_bytes: int  # asked for at launch
    registers: int
    stack_bytes: int  # local memory of a thread, where spilled registers go
    tensor_memory: int  # columns, of GPUs that have it
    matrix_instructions: tuple[str, ...]  # of MATRIX_INSTRUCTIONS
    traps: bool
    ptx: str
    cubin: bytes

    def describe(self) -> dict[str, Any]:
        """Everything but the code, as plain data."""
        return {name: value for name, value in self.__dict__.items() if name not in ("ptx", "cubin")}


def compile_calls(
    calls: Sequence[Call],
    compute_capabilities: Sequence[int],
    cache: Path | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Compiled]]:
    """The kernels of each call in the order of its launches, one after another for each compute capability.

    `progress` gets the calls done and all. Raises `ValueError`, naming the kernel, for what does not compile, and where
    a process was killed. Then, and after Ctrl-C, only the calls that are being compiled are waited for.
    """
    for capability in compute_capabilities:
        if capability not in COMPUTE_CAPABILITIES:
            known = ", ".join(map(str, COMPUTE_CAPABILITIES))
            raise ValueError(f"compute capability {capability} is not supported; supported: {known}")
    _warn_of_races(compute_capabilities)
    if cache is not None:
        _warn_if_closed(cache)
    found: list[list[Compiled]] = [[] for _ in calls]
    processes = min(workers or len(os.sched_getaffinity(0)), max(len(calls), 1))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _compile_not_interpret)
    try:
        with _ctrl_c_blocked():  # the processes inherit it
            todo = enumerate(calls)
            jobs = {pool.submit(_compile_call, call, tuple(compute_capabilities), cache): i for i, call in todo}
        for done, job in enumerate(as_completed(jobs), 1):
            found[jobs[job]] = job.result()
            progress(done, len(calls))
    except BrokenProcessPool:
        raise ValueError("a process that compiles kernels was killed; is there too little memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _warn_of_races(compute_capabilities: Sequence[int]) -> None:
    import triton

    blackwell = [number for number in compute_capabilities if number >= 100]
    if blackwell and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        listed = " and ".join(map(str, blackwell))
        log.warning(
            "triton %s: what it compiles for compute capability %s may race where a state passes through products "
            "(triton-lang/triton issue 10590); 3.8 is the version to build with",
            triton.__version__,
            listed,
        )


def _warn_if_closed(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        log.warning("%s: compiled kernels are not kept there: %s", cache, error.strerror)


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """A terminal sends SIGINT to all processes, and each would print where it was; this one speaks for all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compile_not_interpret() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile_call(call: Call, compute_capabilities: tuple[int, ...], cache: Path | None) -> list[Compiled]:
    planned = plan(call)
    return [
        _compile(call, planned, launch, capability, cache)
        for capability in compute_capabilities
        for launch in planned.launches
    ]


def signature(call: Call, planned: Plan, launch: Launch) -> dict[str, str]:
    """The type of every argument of a launch; an operand that the call lacks is a constant None."""
    from hybridtrt.plugins.gpu.types import POINTERS

    dtypes = {operand.name: operand.spec.dtype for operand in call.operands}
    dtypes |= {name: result.dtype for name, result in zip(call.result_names(), call.results, strict=True)}
    dtypes |= {name: scratch.dtype for name, scratch in planned.scratch.items()}
    sizes = dict.fromkeys(("T", "B", "P"), "i32")
    return {
        name: sizes.get(name) or (POINTERS[dtypes[name]] if name in dtypes else "constexpr")
        for name in launch.arguments()
    }


def _compile(call: Call, planned: Plan, launch: Launch, capability: int, cache: Path | None) -> Compiled:
    import triton

    types = signature(call, planned, launch)
    key = _key(launch, types, capability)
    kept = None if cache is None else load_kernel(cache / key)
    if kept is not None:
        return kept
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = tuple(name for name, kind in types.items() if kind != "constexpr")
    constants = {name: None for name, kind in types.items() if kind == "constexpr"} | dict(launch.constants)
    places = {name: i for i, name in enumerate(launch.parameters())}
    attributes = {(places[n],): [["tt.divisibility", ALIGNMENT]] for n in arguments if types[n].startswith("*")}
    source = ASTSource(
        launch.kernel, types | dict.fromkeys(launch.constants, "constexpr"), constexprs=constants, attrs=attributes
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # of many classes, some private to the compiler
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{call.name} ({call.op}): {launch.name} does not compile for sm_{capability}: {lines[-1]}"
        ) from None
    registers, stack = _resources(made.asm["cubin"])
    ptx: str = made.asm["ptx"]
    compiled = Compiled(
        kernel=launch.name,
        compute_capability=capability,
        key=key,
        arguments=arguments,
        entry=made.metadata.name,
        num_warps=made.metadata.num_warps,
        shared_bytes=made.metadata.shared,
        registers=registers,
        stack_bytes=stack,
        tensor_memory=getattr(made.metadata, "tmem_size", None) or 0,
        matrix_instructions=tuple(name for name in MATRIX_INSTRUCTIONS if name in ptx),
        traps="trap;" in ptx,
        ptx=ptx,
        cubin=made.asm["cubin"],
    )
    if cache is not None:
        with suppress(OSError):  # of which `compile_calls` warns
            save_kernel(compiled, cache / key)
    return compiled


def _key(launch: Launch, types: dict[str, str], capability: int) -> str:
    """A digest of the kernel's source with all it calls, its types and constants, and the compiler's version."""
    import triton

    parts = [triton.__version__, launch.kernel.cache_key, types, sorted(launch.constants.items()), capability]
    return hashlib.sha256(repr([*parts, launch.num_warps, launch.num_stages]).encode()).hexdigest()[:32]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, by NVIDIA's own tool, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout)
    if found is None:
        raise ValueError(f"{tool} shows no resources: {shown.stdout[:200]!r}")
    return int(found[1]), int(found[2])


def save_kernel(compiled: Compiled, folder: Path) -> None:
    """Write a kernel to a folder of its own; whoever reads at the same time finds all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _files(compiled):
        fresh = folder / f".{name}.{os.getpid()}"  # not by `tempfile`, whose files no other user may read
        try:
            fresh.write_bytes(data)
            fresh.replace(folder / name)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def _files(compiled: Compiled) -> Iterator[tuple[str, bytes]]:
    """The description last: where it is, the rest is whole."""
    yield "kernel.cubin", compiled.cubin
    yield "kernel.ptx", compiled.ptx.encode()
    yield "kernel.json", json.dumps(compiled.describe()).encode()


def load_kernel(folder: Path) -> Compiled | None:
    """The kernel of a folder, or None where it is absent or damaged."""
    try:
        data = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
        lists = {name: tuple(data[name]) for name in ("arguments", "matrix_instructions")}
        code = {"ptx": (folder / "kernel.ptx").read_text(encoding="utf-8")}
        return Compiled(**data | lists | code, cubin=(folder / "kernel.cubin").read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return None
