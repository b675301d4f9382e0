"""Compiles the C++ executor and its kernels: `python compile.py [--output FILE] [--sanitize]`; setup.py calls it too.

Needs a C++17 compiler (`CXX`, or g++, clang++, c++) and nothing of Python's or torch's headers. Every kernel is
compiled once for each instruction set of this kind of machine; which one runs is chosen when a program is made.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOMS = HERE.parent
LIBRARY = "_cpu.so"
COMPILED_ONCE = (  # the other sources once for each instruction set
    *(HERE / f"{name}.cpp" for name in ("executor", "isa", "measure_limits", "tactics", "team")),
    ROOMS / "sample/entry.cpp",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
X86 = {"base": (), "avx2": _AVX2, "avx512": _AVX512, "avx512bf16": (*_AVX512, "-mavx512bf16")}
COMMON = (
    *("-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-fno-rtti", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function"),
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")


class CompileError(Exception):
    """No compiler, or it failed; the message has its words."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler. Raises `CompileError` if there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CompileError("no C++ compiler found (looked for CXX, g++, clang++, c++)")


def compile_library(output: Path, objects: Path, sanitize: bool = False, jobs: int | None = None) -> Path:
    """Write the shared library to `output`, keeping object files in `objects` for the next time.

    Raises `CompileError` where there is no compiler or it fails.
    """
    compiler = find_compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*COMMON, *(["-DHT_X86"] if x86 else []), *(SANITIZE if sanitize else [])]
    kernels = [HERE / "kernels.cpp", HERE / "limits.cpp", *sorted(ROOMS.glob("*/cpu.cpp"))]
    units = [(source, ["-pthread"]) for source in COMPILED_ONCE]
    for isa, extra in (X86 if x86 else {"base": ()}).items():
        units += [(source, [f"-DHT_ISA={isa}", "-fno-exceptions", *extra]) for source in kernels]
    version = _run([*compiler, "--version"])
    objects.mkdir(parents=True, exist_ok=True)

    def compile_unit(unit: tuple[Path, list[str]]) -> Path:
        source, extra = unit
        command = [*compiler, *flags, *extra]
        key = hashlib.sha256("\0".join([version, *command]).encode())
        for path in sorted(_included(source)):
            key.update(path.read_bytes())
        target = objects / f"{source.parent.name}-{source.stem}-{key.hexdigest()[:20]}.o"
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            _run([*command, f"-I{HERE}", "-c", str(source), "-o", str(partial)])
            partial.replace(target)
        return target

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        targets = list(pool.map(compile_unit, units))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(f".{os.getpid()}.tmp")
    link = [*compiler, "-shared", "-pthread", "-Wl,-s", *(SANITIZE if sanitize else [])]
    _run([*link, *map(str, targets), "-o", str(partial)])
    partial.replace(output)
    return output


def _included(source: Path) -> set[Path]:
    """A source and all that it includes of ours."""
    found, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            beside = (path.parent / name).resolve()
            waiting.append(beside if beside.exists() else HERE / name)
    return found


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CompileError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and say where the library is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / LIBRARY, help="the library to write (%(default)s)")
    parser.add_argument("--objects", type=Path, default=HERE.parents[1] / ".cache/native", help="kept object files")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    parser.add_argument("--jobs", type=int, help="compilers at once (the number of cores)")
    args = parser.parse_args(arguments)
    try:
        print(compile_library(args.output, args.objects, args.sanitize, args.jobs))
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
