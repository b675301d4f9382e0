"""Machine code of every kernel in the Triton language, for GPUs that are not here: what it takes, and what it holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_calls import BUDGETS, CALLS, Budget

from hybridtrt.build.targets import FP8_COMPUTE_CAPABILITY
from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu import compile as compiling
from hybridtrt.plugins.gpu.compile import SHARED_MEMORY, TENSOR_MEMORY, Compiled, compile_calls
from hybridtrt.plugins.gpu.plan import PLUGINS, plan

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = (80, 90, 100, 120)


def faults(compiled: Compiled, budget: Budget, sixteen_bits: bool) -> list[str]:
    """What breaks the gate."""
    found = []
    if compiled.traps:
        found.append("traps")
    stack = budget.stack if sixteen_bits else max(budget.stack, budget.float32_stack)
    if compiled.stack_bytes > stack:
        found.append(f"{compiled.stack_bytes} bytes of stack, {stack} allowed")
    if compiled.shared_bytes > SHARED_MEMORY[compiled.compute_capability] * 1024:
        found.append(f"{compiled.shared_bytes} bytes of shared memory")
    if compiled.tensor_memory > TENSOR_MEMORY:
        found.append(f"{compiled.tensor_memory} columns of tensor memory")
    if budget.matrix and sixteen_bits and not compiled.matrix_instructions:
        found.append("no matrix instruction")
    return found


def has_fp8(call: Call) -> bool:
    return any(operand.spec.dtype == "fp8" for operand in call.operands)


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_keeps_to_its_budget(name: str) -> None:
    call = CALLS[name]
    sixteen_bits = any(operand.spec.dtype in ("bfloat16", "float16") for operand in call.of("input"))
    capabilities = [number for number in CAPABILITIES if number >= FP8_COMPUTE_CAPABILITY or not has_fp8(call)]
    (kernels,) = compile_calls([call], capabilities, ROOT / ".cache/gpu", workers=1)
    assert {kernel.compute_capability for kernel in kernels} == set(capabilities)
    found = {
        f"{kernel.kernel} sm_{kernel.compute_capability}": broken
        for kernel in kernels
        if (broken := faults(kernel, BUDGETS[kernel.kernel], sixteen_bits))
    }
    assert not found


def test_every_plugin_is_compiled() -> None:
    assert {call.op for call in CALLS.values()} == set(PLUGINS)


def test_the_gate_can_fail(tmp_path: Path) -> None:
    """A kernel that spills, traps, asks for too much or has lost its tensor cores does not pass."""
    kernel = compile_calls([CALLS["conv_float32"]], [86], tmp_path, workers=1)[0][0]
    assert faults(kernel, Budget(), True) == []
    worse = replace(kernel, traps=True, stack_bytes=8, shared_bytes=100 * 1024, tensor_memory=1024)
    assert len(faults(worse, Budget(matrix=True), True)) == 5


def test_all_who_may_read_the_folder_may_read_the_kernels(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        compile_calls([CALLS["conv_float32"]], [86], tmp_path, workers=1)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"kernel.cubin", "kernel.ptx", "kernel.json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    (kernels,) = compile_calls([CALLS["conv_float32"]], [86], tmp_path / "cache", workers=1)
    assert [len(kernel.cubin) > 0 for kernel in kernels] == [True] * len(plan(CALLS["conv_float32"]).launches)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/cache: compiled kernels are not kept there: File exists"
    ]


@pytest.mark.parametrize(
    ("version", "capabilities", "warned"),
    [("3.6.0", [90], False), ("3.6.0", [90, 100, 120], True), ("3.8.0", [100], False), ("3.10.1", [120], False)],
)
def test_a_compiler_that_is_wrong_for_a_gpu_is_named(
    version: str,
    capabilities: list[int],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    compile_calls([], capabilities)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warned
    assert all(line.startswith("triton 3.6.0: what it compiles for compute capability 100 and 120 ") for line in found)


def end_the_process(*arguments: Any) -> None:
    os._exit(1)


def test_a_killed_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_compile_call", end_the_process)
    with pytest.raises(ValueError, match="a process that compiles kernels was killed"):
        compile_calls([CALLS["conv_float32"]] * 2, [86], workers=1)


def test_processes_of_the_compiler_do_not_hear_ctrl_c() -> None:
    show = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set()))"
    with compiling._ctrl_c_blocked():
        shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert shown.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
