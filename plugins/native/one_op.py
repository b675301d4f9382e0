"""One operator by its C++ kernel, called like a torch kernel: for tests, and to look at one operator at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridtrt.plugins.linear.packing import pack
from hybridtrt.plugins.linear.panel_layout import PANEL_ROLES
from hybridtrt.plugins.native.library import TACTIC_RANGES, Node, Operand, Pool, Program, Weight
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.spec import OpSpec, TensorSpec
from hybridtrt.plugins.step import StepBatch

GAP = 3  # numbers between rows, which no kernel may touch


def native_kernel(spec: OpSpec) -> Callable[..., Any]:
    """A function `kernel(step, *inputs, **weights, **caches, **attributes)` of float32 tensors.

    Rows are misaligned and apart, and working memory is NaN. HYBRIDTRT_ISA names the instruction set.
    """
    return partial(run_one, spec)


def run_one(
    spec: OpSpec,
    step: Step,
    *inputs: Tensor,
    threads: int = 1,
    panel: str = "panel_float32",
    group: int | str = 0,
    tactic: int = 0,
    **named: Any,
) -> Any:
    """Run one operator; matrices that have panels are packed as `panel`. Caches are updated in place.

    `group` is the attribute of that name where it is one, and otherwise the numbers that share a scale. `tactic` is the
    index of one that products go by, whatever their rows.

    Raises `ValueError` for an input that has not a row a token, and `AssertionError` where the kernel wrote beside its
    output.
    """
    for x in inputs:
        if len(x) != step.num_tokens:
            raise ValueError(f"{spec.name}: an input of {len(x)} rows in a step of {step.num_tokens} tokens")
    kept: list[Any] = []
    size = 0 if isinstance(group, str) else group
    if "group" in spec.attributes:
        named["group"] = group
    packs = {role: (spec.name, role) in PANEL_ROLES for role in (*spec.weights, *spec.optional_weights)}

    def external(array: Any, rows: str) -> Operand:
        """An operand in memory of its own, `[rows, ...]`."""
        kept.append(array)
        return Operand(f"external_{rows}", array.ctypes.data, 1, array.shape[1], ())

    def operand(x: Tensor) -> Operand:
        values = x.detach().numpy().reshape(len(x), -1)
        values = values.astype(np.float32 if x.is_floating_point() else np.int32)
        wide = np.zeros((len(x), values.shape[1] + GAP), values.dtype)
        wide[:] = np.nan if x.is_floating_point() else -(1 << 30)
        wide[:, 1 : 1 + values.shape[1]] = values
        place = external(wide, "T")
        return Operand(place.space, place.offset, place.column, place.row_stride, tuple(x.shape[1:]))

    def weight(role: str) -> Weight | None:
        value = named.get(role)
        if value is None:
            return None
        if packs[role]:
            return Weight(pack(value, panel, size), panel, tuple(value.shape), size, (tactic,) * TACTIC_RANGES)
        return Weight(value.detach().float().contiguous().view(torch.uint8).numpy(), "float32", tuple(value.shape))

    def pool(value: Tensor) -> Pool:
        name = str(value.dtype).removeprefix("torch.")
        return Pool((value if name == "float32" else value.view(torch.uint16)).numpy(), name)

    numbers, constants = [], []
    for name in spec.attributes:
        value = named.get(name)
        if isinstance(value, (list, tuple)):
            constants.append(Weight(np.array(value, np.float32).view(np.uint8), "float32", (len(value),)))
            value = None
        elif isinstance(value, str):
            value = 0 if name == "group" else spec.choices[name].index(value)
        numbers.append(math.nan if value is None else float(value))
    specs = [TensorSpec(("T", *x.shape[1:]), "float32" if x.is_floating_point() else "int32") for x in inputs]
    given = {
        role: TensorSpec(tuple(named[role].shape))
        for role in (*spec.weights, *spec.optional_weights)
        if named.get(role) is not None
    }
    known = {name: named[name] for name in spec.attributes if name in named}
    results = spec.infer(specs, given, known)
    outputs, arrays = [], []
    for result in results:
        dims = result.row_shape
        rows = {"T": step.num_tokens, "R": len(step.logits_indices), "1": 1}[result.rows]
        dtype = np.int32 if result.dtype.startswith("int") else np.float32
        wide = np.zeros((rows, math.prod(dims) + GAP), dtype)
        wide[:] = -7
        place = external(wide, result.rows)
        outputs.append(Operand(place.space, place.offset, place.column, place.row_stride, dims))
        arrays.append((wide, result))
    node = Node(
        op=spec.name,
        inputs=tuple(operand(x) for x in inputs),
        outputs=tuple(outputs),
        weights=(*(weight(role) for role in (*spec.weights, *spec.optional_weights)), *constants),
        caches=tuple(pool(named[role]) for role in spec.caches),
        attributes=tuple(numbers),
    )
    groups = [named["group"]] if "group" in spec.attributes else list(step.block_tables)
    program = Program([node], 0, 0, groups, threads, poison=True)
    program.step(_batch(step), 1)
    program.close()
    found = []
    for wide, result in arrays:
        width = math.prod(result.row_shape)
        beside = np.delete(wide, np.s_[1 : 1 + width], axis=1)
        assert (beside == -7).all(), f"{spec.name} wrote beside its output"
        shape = result.row_shape if result.rows == "1" else (len(wide), *result.row_shape)
        values = torch.from_numpy(wide[:, 1 : 1 + width].reshape(shape).copy())
        found.append(values.to(getattr(torch, result.dtype)))
    return found[0] if len(found) == 1 else tuple(found)


def _batch(step: Step) -> StepBatch:
    names = ("input_ids", "positions", "cu_seqlens", "context_lens", "state_src", "state_dst", "logits_indices")
    arrays = {name: getattr(step, name).numpy().astype(np.int32) for name in names}
    tables = {group: table.numpy().astype(np.int32) for group, table in step.block_tables.items()}
    slots = None if step.token_slots is None else step.token_slots.numpy().astype(np.int32)
    return StepBatch(**arrays, block_tables=tables, token_slots=slots)
