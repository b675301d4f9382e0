"""One operator call in types alone: what a plugin is declared by, and what its kernels are compiled for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridtrt.plugins.caches import CacheSpec, PageSpec
from hybridtrt.plugins.program import Node, Program
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import Dim, TensorSpec

Source = Literal["input", "weight", "cache", "step"]

STEP_SHAPES: Mapping[str, tuple[Dim, ...]] = {
    "input_ids": ("T",),
    "positions": ("T",),
    "cu_seqlens": ("B+1",),
    "context_lens": ("B",),
    "block_tables": ("B", "P"),
    "state_src": ("B",),
    "state_dst": ("B",),
    "token_slots": ("T",),
    "logits_indices": ("R",),
}


@dataclass(frozen=True)
class Operand:
    """An operand by the name that kernels know it by. `bound_to` is its name in the program or the step contract.

    Besides "T" and "R" its shape may have the symbols "B" (sequences), "B+1", "P" (pages of a row in the block table),
    "slots" and "pages" (of a pool).
    """

    name: str
    source: Source
    spec: TensorSpec
    bound_to: str


@dataclass(frozen=True)
class Call:
    """An operator with its operands in the order in which every plugin takes them, and with what it returns.

    Operands are the inputs, the weights and the caches that the node has, in the order of the operator's spec, then the
    arrays of the step contract that it reads, optional ones where they are inputs of the program. The block table is
    that of the node's page group; an operator without one gets the first group's, if there is any: a row that is no
    padding has a page of every group. A plugin returns the operator's results and then, as aliases of its operands, the
    caches.
    """

    op: str
    name: str
    operands: tuple[Operand, ...]
    results: tuple[TensorSpec, ...]
    attributes: Mapping[str, Any]

    def operand(self, name: str) -> TensorSpec:
        """The spec of an operand that the call has."""
        return next(operand.spec for operand in self.operands if operand.name == name)

    def has(self, name: str) -> bool:
        return any(operand.name == name for operand in self.operands)

    def of(self, source: Source) -> tuple[Operand, ...]:
        """The operands of one source."""
        return tuple(operand for operand in self.operands if operand.source == source)

    @property
    def key(self) -> str:
        """A digest of all that its kernels depend on: calls of one key differ in names alone."""
        operands = [(operand.name, operand.spec.shape, operand.spec.dtype) for operand in self.operands]
        results = [(result.shape, result.dtype) for result in self.results]
        attributes = {name: value for name, value in self.attributes.items() if name != "group"}
        text = json.dumps([self.op, operands, results, attributes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def result_names(self) -> tuple[str, ...]:
        """What kernels call the results: `out`, or `out_0`, `out_1`, ... where there are several."""
        return ("out",) if len(self.results) == 1 else tuple(f"out_{i}" for i in range(len(self.results)))


def call_of(program: Program, node: Node, page_size: int, dtype_of: Callable[[str], str] | None = None) -> Call:
    """The call of a node. `dtype_of` names the dtype of a value or a weight where it is not what the program says."""
    spec = op_spec(node.op)

    def typed(name: str, declared: TensorSpec) -> TensorSpec:
        return declared if dtype_of is None else TensorSpec(declared.shape, dtype_of(name))

    inputs = zip((*spec.inputs, *spec.optional_inputs), node.inputs, strict=False)
    operands = [Operand(role, "input", typed(value, program.values[value]), value) for role, value in inputs]
    for role in (*spec.weights, *spec.optional_weights):
        if role in node.weights:
            weight = node.weights[role]
            operands.append(Operand(role, "weight", typed(weight, program.weights[weight]), weight))
    for role in spec.caches:
        cache = program.caches[node.caches[role]]
        operands.append(Operand(role, "cache", pool_spec(cache, page_size), cache.name))
    optional = (name for name in spec.optional_step_inputs if name in program.inputs)
    for name in (*spec.step_inputs, *optional):
        bound_to = name
        if name == "block_tables":
            group = node.attributes.get("group", _first_group(program))
            if group is None:
                continue
            bound_to = f"{name}.{group}"
        operands.append(Operand(name, "step", TensorSpec(STEP_SHAPES[name], "int32"), bound_to))
    results = tuple(typed(output, program.values[output]) for output in node.outputs)
    return Call(node.op, node.name, tuple(operands), results, node.attributes)


def _first_group(program: Program) -> str | None:
    return next((cache.group for cache in program.caches.values() if isinstance(cache, PageSpec)), None)


def pool_spec(cache: CacheSpec, page_size: int) -> TensorSpec:
    """Shape and dtype of a cache's pool."""
    if isinstance(cache, PageSpec):
        return TensorSpec(("pages", page_size, *cache.shape), cache.dtype)
    return TensorSpec(("slots", *cache.shape), cache.dtype)
