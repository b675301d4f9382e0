"""The kernels' benchmark, and `pytest -m gpu`, where nothing but torch and Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_calls import CALLS, experts

from hybridtrt.plugins.gpu.torch_launch import TorchLauncher

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = """
import builtins, runpy, sys

find = builtins.__import__
known = {"torch", "triton", "hybridtrt", *ALSO, *sys.stdlib_module_names}

def find_known(name, globals=None, locals=None, fromlist=(), level=0):
    file = (globals or {}).get("__file__") or ""
    ours = file.startswith(ROOT) and not file.startswith(sys.prefix)  # which may lie inside
    if ours and name.split(".")[0] not in known and not name.startswith("gpu_"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return find(name, globals, locals, fromlist, level)

builtins.__import__ = find_known
"""


def run(program: str, also: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of Python in which no file of the project finds other packages than torch, Triton and `also`."""
    code = f"ROOT, ALSO = {str(ROOT)!r}, {also!r}\n{LAUNCH}\n{program}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("call", ["conv_float32", "capacity_gpt_oss"])
def test_the_numerics_need_torch_and_triton_alone(call: str) -> None:
    program = 'sys.path.insert(0, "benchmarks"); runpy.run_path("benchmarks/gpu.py", run_name="__main__")'
    done = run(program, set(), "--device", "cpu", "--only", call, "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["ok", call]]


def test_the_gpu_tests_need_pytest_besides() -> None:
    program = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = run(program, {"pytest", "_pytest"}, "-m", "gpu", "-p", "no:cacheprovider", "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout
    assert "skipped" in done.stdout


def test_operands_that_are_not_contiguous_are_refused() -> None:
    """Kernels address operands by their shapes: they would read other numbers."""
    call = CALLS["capacity_gpt_oss"]
    memory = {operand.name: torch.zeros([3] * len(operand.spec.shape)) for operand in call.operands}
    with pytest.raises(ValueError, match=r"capacity \(capacity\): weights is not contiguous: strides \(1, 3\)$"):
        TorchLauncher(call, memory | {"weights": torch.zeros(3, 3).T})


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_quantised_experts_have_operands(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    call = experts(4, 2, 64, 32, dtype="float16", weights=weights)
    right = gpu.compare("experts", call, gpu.Rows((1, 4), (5, 0)), "cpu", 0)
    assert right.error <= right.allowed
