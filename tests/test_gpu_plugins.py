"""What is derived from a call's launches: launches of machine code by a driver, and plugins compiled ahead of time."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import typing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from gpu_calls import CALLS

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.aot import aot_nodes, register
from hybridtrt.plugins.gpu.compile import Compiled, compile_calls
from hybridtrt.plugins.gpu.kernel_folder import KernelFolder, write_kernels
from hybridtrt.plugins.gpu.launcher import Launcher
from hybridtrt.plugins.gpu.plan import Sizes, plan
from hybridtrt.plugins.gpu.ptx import with_parameters

ROOT = Path(__file__).resolve().parent.parent
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


class RecordingDriver:
    """Remembers what was loaded and launched, with the values behind the argument pointers."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launches: list[tuple[str, tuple[int, int, int], int, int, int, list[int | None]]] = []

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> int:
        assert cubin[:4] == b"\x7fELF"
        self.loaded.append(entry)
        return len(self.loaded) - 1

    def launch(self, function: int, grid: Any, threads: int, shared_bytes: int, stream: int, arguments: Any) -> None:
        assert all(isinstance(argument, ctypes.c_void_p | ctypes.c_int32) for argument in arguments)
        values = [argument.value for argument in arguments]
        self.launches.append((self.loaded[function], grid, threads, shared_bytes, stream, values))


def compiled(call: Call) -> list[Compiled]:
    return compile_calls([call], [90], ROOT / ".cache/gpu", workers=1)[0]


def addresses(call: Call) -> dict[str, int]:
    """Made-up addresses, all different."""
    names = [operand.name for operand in call.operands] + list(call.result_names())
    return {name: 1 << 20 | i << 12 for i, name in enumerate(names)}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sizes", [Sizes(T=5, B=5, P=3), Sizes(T=130, B=3, P=7)])
def test_launches_get_their_operands_by_name(name: str, sizes: Sizes) -> None:
    """Every launch that the step needs, in order, with each address where the kernel has that parameter."""
    call, driver = CALLS[name], RecordingDriver()
    kernels = compiled(call)
    launcher = Launcher(call, kernels, driver)
    known = addresses(call)
    scratch, end = 1 << 30, (1 << 30) + launcher.scratch_bytes(sizes)
    launcher.launch(known, sizes, scratch, stream=77)
    planned = plan(call)
    pairs = [(item, kernel) for item, kernel in zip(planned.launches, kernels, strict=True) if item.runs(sizes)]
    assert [launch[0] for launch in driver.launches] == [kernel.entry for _, kernel in pairs]
    seen: dict[str, int] = {}
    for (_, grid, threads, shared, stream, values), (item, kernel) in zip(driver.launches, pairs, strict=True):
        assert grid == (*item.grid(sizes), 1, 1)[:3]
        assert (threads, shared, stream) == (32 * kernel.num_warps, kernel.shared_bytes, 77)
        assert values[-2:] == [None, None]
        for argument, value in zip(kernel.arguments, values[:-2], strict=True):
            if argument in planned.scratch:
                assert value is not None
                assert scratch <= value < end
                assert seen.setdefault(argument, value) == value
            else:
                assert value == (known.get(argument) or getattr(sizes, argument))
    assert len(set(seen.values())) == len(seen)


def test_a_pointer_off_its_alignment_is_refused() -> None:
    call = CALLS["conv_float32"]
    launcher = Launcher(call, compiled(call), RecordingDriver())
    known = addresses(call) | {"state": (1 << 20) + 8}
    with pytest.raises(ValueError, match="state at 0x100008 is not aligned to 16 bytes"):
        launcher.launch(known, Sizes(5, 5, 0), 1 << 30, 0)


def test_kernels_of_another_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"causal_conv: kernels .* are not"):
        Launcher(CALLS["conv_grouped"], compiled(CALLS["conv_float32"]), RecordingDriver())


@pytest.mark.parametrize("name", CALLS)
def test_plugins_ahead_of_time_take_inputs_then_numbers_then_outputs(name: str, tmp_path: Path) -> None:
    """The rewritten PTX still assembles, and all that a node reads is an operand or was written before."""
    call = CALLS[name]
    kernels = compiled(call)
    there = {operand.name for operand in call.operands}
    for node, kernel, launch in zip(aot_nodes(call, kernels), kernels, plan(call).launches, strict=True):
        assert set(node.inputs) <= there
        for output in node.outputs:
            assert output.alias == (output.name if output.name in there else None)
        there |= {output.name for output in node.outputs}
        reads = {argument for argument in kernel.arguments if argument not in Sizes._fields}
        assert reads <= {*node.inputs, *(output.name for output in node.outputs)}
        assert set(launch.writes) == {output.name for output in node.outputs}
        header = re.search(rf"entry {node.entry}\((.*?)\n\)", node.ptx, re.DOTALL)
        assert header is not None
        types = [".u64" in line for line in header[1].strip().splitlines()]
        assert types == [True] * len(node.inputs) + [False] * len(node.scalars) + [True] * len(node.outputs)
        source = tmp_path / "kernel.ptx"
        source.write_text(node.ptx, encoding="utf-8")
        subprocess.run([PTXAS, "-arch=sm_90a", "-O0", "-o", tmp_path / "kernel.cubin", source], check=True)


def test_parameters_that_a_kernel_reads_cannot_be_left_out() -> None:
    kernel = compiled(CALLS["conv_float32"])[0]
    with pytest.raises(ValueError, match="reads its parameter 0, which the order leaves out"):
        with_parameters(kernel.ptx, range(1, len(kernel.arguments)))
    with pytest.raises(ValueError, match="no visible entry"):
        with_parameters("// nothing", [])


class StandIn:
    """As much of `tensorrt.plugin` as a registration uses, with plain numbers for symbolic dimensions."""

    class TensorDesc:
        def __init__(self, shape: tuple[int, ...] = (), alias: Any = None) -> None:
            self.shape_expr, self.dtype, self.alias = list(shape), None, alias

        def aliased(self) -> StandIn.TensorDesc:
            return StandIn.TensorDesc(tuple(self.shape_expr), self)

    KernelLaunchParams = SimpleNamespace
    SymInt32 = ShapeExpr = int

    def __init__(self) -> None:
        self.described: dict[str, Any] = {}
        self.implemented: dict[str, Any] = {}
        self.op = SimpleNamespace(hybridtrt=SimpleNamespace())

    @staticmethod
    def ShapeExprs(count: int) -> list[int]:  # noqa: N802
        return [0] * count

    SymIntExprs = ShapeExprs

    def register(self, identifier: str) -> Any:
        """TensorRT wants every argument and the result annotated."""

        def add(function: Any) -> None:
            signature = inspect.signature(function)
            assert all(p.annotation is StandIn.TensorDesc for p in signature.parameters.values())
            assert set(typing.get_args(signature.return_annotation)) == {StandIn.TensorDesc}
            self.described[identifier] = function
            setattr(self.op.hybridtrt, identifier.split("::")[1], identifier)

        return add

    def aot_impl(self, identifier: str) -> Any:
        def add(function: Any) -> None:
            signature = inspect.signature(function)
            assert list(signature.parameters)[-2:] == ["outputs", "tactic"]
            assert len(typing.get_args(signature.return_annotation)) == 4
            self.implemented[identifier] = function

        return add


def test_a_registered_node_says_shapes_aliases_and_launch() -> None:
    """At a step of 100 tokens in 3 rows: what TensorRT would ask the functions for."""
    call, trtp = CALLS["conv_float32"], StandIn()
    kernels = compiled(call)
    trt = SimpleNamespace(float32="f32", float16="f16", bfloat16="bf16", int32="i32", int64="i64")
    sizes = {"T": 100, "B": 3, "B+1": 4, "slots": 9}
    shapes = {
        operand.name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in operand.spec.shape)
        for operand in call.operands
    } | {"out": (100, 512)}
    for node, kernel, launch in zip(aot_nodes(call, kernels), kernels, plan(call).launches, strict=True):
        identifier = register(trtp, trt, node)
        assert register(trtp, trt, node) == identifier  # once a process
        inputs = [StandIn.TensorDesc(shapes[name]) for name in node.inputs]
        results = trtp.described[identifier](*inputs)
        for output, result in zip(node.outputs, results, strict=True):
            assert tuple(result.shape_expr) == shapes[output.name]
            if output.alias is None:
                assert result.dtype == "f32"
            else:
                assert result.alias is inputs[node.inputs.index(output.alias)]
        entry, ptx, params, numbers = trtp.implemented[identifier](*inputs, results, 0)
        assert (entry, ptx) == (kernel.entry, node.ptx)
        grid = launch.grid(Sizes(100, 3, 0))
        assert [getattr(params, f"grid_{axis}") for axis in "xyz"[: len(grid)]] == list(grid)
        assert (params.block_x, params.shared_mem) == (32 * kernel.num_warps, kernel.shared_bytes)
        assert numbers == [{"T": 100, "B": 3}[name] for name in node.scalars]


def test_kernels_of_an_engine_come_back_from_their_folder(tmp_path: Path) -> None:
    """Two calls that differ in names share kernels; each compute capability has its own."""
    call = CALLS["conv_float32"]
    calls = [call, replace(call, name="another"), CALLS["conv_grouped"]]
    seen: list[tuple[int, int]] = []
    write_kernels(
        tmp_path / "kernels", calls, [80, 90], ROOT / ".cache/gpu", lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 2), (2, 2)]
    for capability in (80, 90):
        driver = RecordingDriver()
        folder = KernelFolder(tmp_path / "kernels", capability, driver)
        assert folder.launcher(calls[0]) is folder.launcher(calls[1])
        assert len(driver.loaded) == len(plan(call).launches)
    with pytest.raises(
        ValueError, match="kernels for compute capability 80, 90, not for 89, which this GPU has; build"
    ):
        KernelFolder(tmp_path / "kernels", 89, RecordingDriver())
    with pytest.raises(ValueError, match=r"there are no kernels for causal_conv \(causal_conv\)"):
        folder.launcher(CALLS["conv_qwen3_next"])


@pytest.mark.parametrize("text", ["", "{}", '{"compute_capabilities": [80], "calls": {"a": {}}}', "[]", "[" * 100_000])
def test_a_damaged_folder_of_kernels(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        KernelFolder(tmp_path, 80, RecordingDriver())
    with pytest.raises(ValueError, match=r"kernels of the engine are missing \(No such file or directory\)"):
        KernelFolder(tmp_path / "nowhere", 80, RecordingDriver())


def test_a_missing_kernel(tmp_path: Path) -> None:
    write_kernels(tmp_path / "kernels", [CALLS["conv_float32"]], [90], ROOT / ".cache/gpu")
    next((tmp_path / "kernels").rglob("*.cubin")).unlink()
    with pytest.raises(ValueError, match=r"the kernel of causal_conv \(causal_conv\) is missing or damaged"):
        KernelFolder(tmp_path / "kernels", 90, RecordingDriver()).launcher(CALLS["conv_float32"])
