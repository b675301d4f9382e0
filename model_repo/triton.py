"""Starting the tritonserver of nvidia-pytriton on loopback, and asking it whether it is there."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from hybridtrt.model_repo.child import Child, children
from hybridtrt.model_repo.preflight import LOOPBACK, Triton, check_stub, python_library
from hybridtrt.model_repo.repository import MODELS
from hybridtrt.model_repo.state import State

SHM_BYTES_OF_A_MODEL = 4 << 20
EXIT_TIMEOUT_SECONDS = 10


def environment(triton: Triton, state: State) -> dict[str, str]:
    """The environment of tritonserver; its stub takes the interpreter from PATH and libpython from the state's folder.

    Raises:
        ServeError: the stub cannot be loaded in it.
    """
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    if library := python_library():
        state.libraries.mkdir(exist_ok=True)
        _link(state.libraries / library.name, library)
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(state.libraries), env.get("LD_LIBRARY_PATH"))))
    check_stub(triton.stub, env)
    return env


def start(triton: Triton, state: State, ports: Mapping[str, int], env: Mapping[str, str]) -> Child:
    """Start tritonserver with the state's model repository."""
    backend = state.backends / "python"
    backend.mkdir(parents=True, exist_ok=True)
    for file in triton.backend_files:
        _link(backend / file.name, file)
    return Child("tritonserver", command(triton, state, ports), state.triton_log, env)


def command(triton: Triton, state: State, ports: Mapping[str, int]) -> list[str]:
    """The command line. Only the inference and health interfaces are open: the others want a key that nobody has."""
    key = secrets.token_hex(16)
    closed = f"model-repository,logging,trace,shared-memory:admin-key={key}"
    fronts = [f"--{front}-address={LOOPBACK}" for front in ("http", "grpc", "metrics")]
    return [
        str(triton.server),
        f"--model-repository={state.repository}",
        f"--backend-directory={state.backends}",
        f"--cache-directory={triton.caches}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in MODELS),
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        *fronts,
        *(f"--{name.replace('_', '-')}={port}" for name, port in ports.items()),
        "--metrics-interval-ms=1000",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        "--cuda-memory-pool-byte-size=0:0",
        f"--backend-config=python,shm-region-prefix-name={state.shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={SHM_BYTES_OF_A_MODEL}",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
    ]


def stubs(server: Child) -> set[int]:
    """The processes in which the models run, one each."""
    return children(server.pid, "triton_python_backend_stub")


def answers(http_port: int, path: str, timeout: float = 5.0) -> bool:
    """Whether a GET gets status 200."""
    connection = http.client.HTTPConnection(LOOPBACK, http_port, timeout=timeout)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)
