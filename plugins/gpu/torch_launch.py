"""An operator's launches on torch tensors: on a GPU, or on CPU tensors where TRITON_INTERPRET=1 was set before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridtrt.plugins.call import STEP_SHAPES, Call, Operand
from hybridtrt.plugins.gpu.plan import Sizes, plan
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.spec import OpSpec, TensorSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_launch(spec: OpSpec) -> Callable[..., Any]:
    """The operator as a function with the signature of its reference; operands must be on one device."""

    def run(step: Step, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        launcher = TorchLauncher(*_bind(spec, step, inputs, named))
        launcher.run()
        return launcher.results[0] if len(launcher.results) == 1 else tuple(launcher.results)

    return run


class TorchLauncher:
    """A call bound to tensors by operand name, with memory of its own for results and scratch; launches on `run`."""

    def __init__(self, call: Call, memory: Mapping[str, Tensor | None]) -> None:
        """What kernels must write is NaN. Raises `ValueError` for a tensor that is not contiguous."""
        for name, tensor in memory.items():
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{call.name} ({call.op}): {name} is not contiguous: strides {tensor.stride()}")
        sizes = _sizes(call, memory)
        device = next(tensor.device for tensor in memory.values() if tensor is not None)
        planned = plan(call)
        self.results: list[Tensor] = []
        for result in call.results:
            shape = tuple(getattr(sizes, dim) if isinstance(dim, str) else dim for dim in result.shape)
            self.results.append(_new(shape, result.dtype, device))
        known: dict[str, Any] = {**memory, **sizes._asdict()}
        known |= zip(call.result_names(), self.results, strict=True)
        known |= {name: _new(item.shape(sizes), item.dtype, device) for name, item in planned.scratch.items()}
        self._launches = [
            (item, item.grid(sizes), {name: known.get(name) for name in item.arguments()})
            for item in planned.launches
            if item.runs(sizes)
        ]

    def run(self) -> None:
        """Launch everything that the step needs."""
        for item, grid, arguments in self._launches:
            options = {"num_warps": item.num_warps, "num_stages": item.num_stages}
            item.kernel[grid](**arguments, **item.constants, **options)


def _bind(
    spec: OpSpec, step: Step, inputs: tuple[Tensor, ...], named: dict[str, Any]
) -> tuple[Call, dict[str, Tensor | None]]:
    operands: list[Operand] = []
    memory: dict[str, Tensor | None] = {}

    def add(name: str, source: Any, tensor: Tensor, shape: tuple[Any, ...]) -> TensorSpec:
        declared = TensorSpec(shape, _NAMES[tensor.dtype])
        operands.append(Operand(name, source, declared, name))
        memory[name] = tensor if source == "cache" else tensor.contiguous()
        return declared

    values = [
        add(name, "input", x, ("T", *x.shape[1:]))
        for name, x in zip((*spec.inputs, *spec.optional_inputs), inputs, strict=False)
    ]
    weights = {
        name: add(name, "weight", named[name], tuple(named[name].shape))
        for name in (*spec.weights, *spec.optional_weights)
        if named.get(name) is not None
    }
    for name in spec.caches:
        pool = named[name]
        if not pool.is_contiguous():
            raise ValueError(f"{spec.name}: the pool {name} is not contiguous")
        add(name, "cache", pool, ("pages" if name == "kv" else "slots", *pool.shape[1:]))
    attributes = {name: value for name, value in named.items() if name in spec.attributes}
    group = attributes.get("group", next(iter(step.block_tables), ""))  # as `call_of` has it
    for name in (*spec.step_inputs, *spec.optional_step_inputs):
        table = step.block_tables.get(group) if name == "block_tables" else getattr(step, name)
        if table is not None:
            add(name, "step", table.to(device=inputs[0].device, dtype=torch.int32), STEP_SHAPES[name])
    results = tuple(spec.infer(values, weights, attributes))
    return Call(spec.name, spec.name, tuple(operands), results, attributes), memory


def _sizes(call: Call, memory: Mapping[str, Tensor | None]) -> Sizes:
    found = {"T": 0, "B": 0, "P": 0}
    for operand in call.operands:
        tensor = memory[operand.name]
        for dim, size in zip(operand.spec.shape, () if tensor is None else tensor.shape, strict=True):
            if dim == "B+1":
                found["B"] = size - 1
            elif dim in found:
                found[str(dim)] = size
    return Sizes(**found)


def _new(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    kind = TORCH_DTYPES[dtype]
    return torch.full(shape, torch.nan if kind.is_floating_point else -1, dtype=kind, device=device)
