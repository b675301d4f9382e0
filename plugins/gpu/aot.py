"""Ahead-of-time plugins of full TensorRT (`tensorrt.plugin`, 10.14 and later): one for each launch of a call.

TensorRT keeps the PTX in the engine and launches it itself, without Python: its arguments are the inputs, then whole
numbers computed from dimensions, then the outputs. So a launch becomes a node whose inputs are what the kernel reads,
whose outputs are what it writes; memory that it writes in part (a cache, or a result that several launches share) is
both, as an alias. The kernel itself is the one that all other ways use, with its parameters in that order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.compile import Compiled
from hybridtrt.plugins.gpu.plan import Sizes, plan
from hybridtrt.plugins.gpu.ptx import with_parameters
from hybridtrt.plugins.spec import Dim

NAMESPACE = "hybridtrt"
_WARP = 32
Grid = Callable[[Sizes], tuple[Any, ...]]


@dataclass(frozen=True)
class AotOutput:
    """What a node writes: `alias` names the input that it is; `shape` gives its dimensions where it is new memory."""

    name: str
    dtype: str
    alias: str | None
    shape: Grid


@dataclass(frozen=True)
class AotNode:
    """One launch as a plugin: names of its inputs in order, its outputs, and the PTX that takes them in that order."""

    plugin: str
    inputs: tuple[str, ...]
    outputs: tuple[AotOutput, ...]
    scalars: tuple[str, ...]  # of `Sizes`, between inputs and outputs
    dims: dict[str, tuple[int, int]]  # the input and its axis that a size is
    row_ends: bool  # that of "B" is cu_seqlens, which has one more
    entry: str
    ptx: str
    grid: Grid
    threads: int
    shared_bytes: int

    def sizes(self, dimension: Callable[[int, int], Any]) -> Sizes:
        """Sizes of the step by the dimensions of the inputs; a size that nothing needs is 0."""
        found = {name: dimension(*self.dims[name]) if name in self.dims else 0 for name in Sizes._fields}
        if self.row_ends:
            found["B"] = found["B"] - 1
        return Sizes(**found)


def aot_nodes(call: Call, kernels: Sequence[Compiled]) -> list[AotNode]:
    """The nodes of a call, from its kernels for one compute capability in the order of the launches."""
    planned = plan(call)
    dtypes = {operand.name: operand.spec.dtype for operand in call.operands}
    results = dict(zip(call.result_names(), call.results, strict=True))
    shapes: dict[str, Grid] = {name: scratch.shape for name, scratch in planned.scratch.items()}
    shapes |= {name: _shape_of(result.shape) for name, result in results.items()}
    dtypes |= {name: result.dtype for name, result in results.items()}
    dtypes |= {name: scratch.dtype for name, scratch in planned.scratch.items()}
    written: set[str] = {operand.name for operand in call.operands}
    nodes = []
    for launch, kernel in zip(planned.launches, kernels, strict=True):
        named = [name for name in kernel.arguments if name not in Sizes._fields]
        inputs = [name for name in named if name in written]
        inputs += [name for name in _carriers(call, inputs) if name not in inputs]
        dims = _dims(call, inputs)
        scalars = tuple(name for name in kernel.arguments if name in Sizes._fields)
        outputs = tuple(
            AotOutput(name, dtypes[name], name if name in written else None, shapes.get(name, lambda sizes: ()))
            for name in launch.writes
        )
        number = {name: i for i, name in enumerate(kernel.arguments)}
        new = [None if output.alias else number[output.name] for output in outputs]
        order = [*(number.get(name) for name in inputs), *(number[name] for name in scalars), *new]
        nodes.append(
            AotNode(
                plugin=f"{kernel.kernel}_{kernel.key[:16]}_{call.key[:16]}",
                inputs=tuple(inputs),
                outputs=outputs,
                scalars=scalars,
                dims={size: (inputs.index(name), axis) for size, (name, axis) in dims.items()},
                row_ends="B" in dims and dims["B"][0] == "cu_seqlens",
                entry=kernel.entry,
                ptx=with_parameters(kernel.ptx, order),
                grid=launch.grid,
                threads=kernel.num_warps * _WARP,
                shared_bytes=kernel.shared_bytes,
            )
        )
        written |= set(launch.writes)
    return nodes


def _shape_of(shape: tuple[Dim, ...]) -> Grid:
    return lambda sizes: tuple(getattr(sizes, dim) if isinstance(dim, str) else dim for dim in shape)


def _dims(call: Call, inputs: Sequence[str]) -> dict[str, tuple[str, int]]:
    """An input and an axis of it for each size that the operands among the inputs have."""
    found: dict[str, tuple[str, int]] = {}
    for operand in call.operands:
        if operand.name in inputs:
            for axis, dim in enumerate(operand.spec.shape):
                size = "B" if dim == "B+1" else str(dim)
                if size in Sizes._fields and (size not in found or dim == "B"):
                    found[size] = operand.name, axis
    return found


def _carriers(call: Call, inputs: Sequence[str]) -> list[str]:
    """Operands that a node needs for their dimensions alone."""
    here = _dims(call, inputs)
    every = _dims(call, [operand.name for operand in call.operands])
    return [name for size, (name, _) in every.items() if size not in here]


def register(trtp: Any, trt: Any, node: AotNode) -> Any:
    """Register a node with `tensorrt.plugin` (once a process) and return what makes a plugin of it.

    `trtp` and `trt` are the modules `tensorrt.plugin` and `tensorrt`.
    """
    names = [f"input_{i}" for i in range(len(node.inputs))]

    def describe(*inputs: Any) -> tuple[Any, ...]:
        sizes = node.sizes(lambda i, axis: inputs[i].shape_expr[axis])
        described = []
        for output in node.outputs:
            if output.alias is not None:
                described.append(inputs[node.inputs.index(output.alias)].aliased())
                continue
            result = trtp.TensorDesc()
            dims = output.shape(sizes)
            result.dtype, result.shape_expr = _trt_dtype(trt, output.dtype), trtp.ShapeExprs(len(dims))
            for axis, dim in enumerate(dims):
                result.shape_expr[axis] = trtp.ShapeExpr(dim)
            described.append(result)
        return tuple(described)

    def implement(*arguments: Any) -> tuple[str, str, Any, Any]:
        sizes = node.sizes(lambda i, axis: arguments[i].shape_expr[axis])
        launch = trtp.KernelLaunchParams()
        for axis, programs in zip("xyz", node.grid(sizes), strict=False):
            setattr(launch, f"grid_{axis}", programs)
        launch.block_x, launch.shared_mem = node.threads, node.shared_bytes
        scalars = trtp.SymIntExprs(len(node.scalars))
        for i, name in enumerate(node.scalars):
            scalars[i] = trtp.SymInt32(getattr(sizes, name))
        return node.entry, node.ptx, launch, scalars

    # TensorRT reads names and types of the arguments from the functions' signatures.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tensors = [inspect.Parameter(name, kind, annotation=trtp.TensorDesc) for name in names]
    returned = GenericAlias(tuple, (trtp.TensorDesc,) * len(node.outputs))
    describe.__signature__ = inspect.Signature(tensors, return_annotation=returned)  # type: ignore[attr-defined]
    rest = [inspect.Parameter(name, kind) for name in (*names, "outputs", "tactic")]
    made = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    implement.__signature__ = inspect.Signature(rest, return_annotation=made)  # type: ignore[attr-defined]
    identifier = f"{NAMESPACE}::{node.plugin}"
    space = trtp.op.define_or_get(NAMESPACE) if hasattr(trtp.op, "define_or_get") else getattr(trtp.op, NAMESPACE)
    if not hasattr(space, node.plugin):
        trtp.register(identifier)(describe)
        trtp.aot_impl(identifier)(implement)
    return getattr(space, node.plugin)


def _trt_dtype(trt: Any, dtype: str) -> Any:
    return {
        "float32": trt.float32,
        "float16": trt.float16,
        "bfloat16": trt.bfloat16,
        "int32": trt.int32,
        "int64": trt.int64,
    }[dtype]
