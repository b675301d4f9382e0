"""What must hold before tritonserver is started: it would hang, or serve garbage, where these checks fail."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
SHM = Path("/dev/shm")
MIN_SHM_BYTES = 32 << 20


class ServeError(ValueError):
    """Why the server cannot run, in one line."""


@dataclass(frozen=True)
class Triton:
    """The tritonserver of the package nvidia-pytriton."""

    root: Path

    @property
    def server(self) -> Path:
        return self.root / "bin/tritonserver"

    @property
    def caches(self) -> Path:
        return self.root / "caches"

    @property
    def stub(self) -> Path:
        return self.root / f"python_backend_stubs/{_python_version()}/triton_python_backend_stub"

    @property
    def backend_files(self) -> tuple[Path, ...]:
        """The Python backend; the package keeps its stubs, one a Python version, elsewhere."""
        python = self.root / "backends/python"
        return python / "libtriton_python.so", python / "triton_python_backend_utils.py", self.stub


def find_triton() -> Triton:
    """Raises: ServeError: the package is missing or has nothing for this interpreter."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServeError("tritonserver is missing: pip install nvidia-pytriton==0.7.0")
    triton = Triton(Path(spec.submodule_search_locations[0]) / "tritonserver")
    for path in (triton.server, *triton.backend_files):
        if not path.exists():
            raise ServeError(f"nvidia-pytriton has no {path.relative_to(triton.root)} for Python {_python_version()}")
    return triton


def check_interpreter(executable: str = sys.executable) -> None:
    """Raises: ServeError: the stub takes `python3` of the interpreter's folder, and that is another interpreter."""
    python3 = Path(executable).with_name("python3")
    if python3.resolve() != Path(executable).resolve():
        raise ServeError(f"{python3} is not {executable}: run in a virtual environment")


def check_numpy(version: str) -> None:
    """Raises: ServeError: Triton's stub garbles the tensors of this numpy."""
    if int(version.split(".")[0]) >= 2:
        raise ServeError(f"numpy {version} is too new for Triton's Python backend: pip install 'numpy<2'")


def python_library() -> Path | None:
    """The interpreter's own libpython, where it has one; the stub must load this one and no other."""
    names = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    path = Path(*map(str, names))
    return path if path.suffix != ".a" and path.exists() else None


def check_stub(stub: Path, env: Mapping[str, str]) -> None:
    """Raises: ServeError: names a shared library that the stub would not find; tritonserver would wait for ever."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return
    output = subprocess.run([ldd, str(stub)], env=env, capture_output=True, text=True, check=False).stdout
    if missing := re.findall(r"^\s*(\S+) => not found", output, re.MULTILINE):
        hint = " (install it, or use an interpreter built with --enable-shared)" if "libpython" in missing[0] else ""
        raise ServeError(f"Triton's Python backend needs {missing[0]}, which is not there{hint}")


def check_shm(folder: Path = SHM, wanted: int = MIN_SHM_BYTES) -> None:
    """Raises: ServeError: there is too little shared memory for Triton's Python backend."""
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    if free < wanted:
        mib = f"{free / 2**20:.1f} MiB free, {wanted >> 20} MiB are needed"
        raise ServeError(f"{folder} has {mib} (docker run --shm-size)")


def claim_ports(ports: Mapping[str, int]) -> dict[str, int]:
    """The ports by their names, with a free one in place of 0.

    Raises:
        ServeError: names a port that is in use or not a port.
    """
    claimed: dict[str, int] = {}
    held = []
    try:
        for name, port in ports.items():
            if not 0 <= port < 65536:
                raise ServeError(f"{name}={port} is not a port")
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, port))
                listener.listen()
            except OSError as error:
                taken = next((other for other, number in claimed.items() if number == port), None)
                why = f"it is {taken} too" if taken else error.strerror
                raise ServeError(f"{name}={port} cannot be used: {why}") from None
            claimed[name] = listener.getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    return claimed


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
