"""What a network is called with: the arrays of the step contract and the cache pools, by name, shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridtrt.plugins.caches import PageSpec
from hybridtrt.plugins.call import STEP_SHAPES, pool_spec
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import Dim, TensorSpec

LOGITS = "logits"  # the output [R, vocab], float32


@dataclass(frozen=True)
class Bindings:
    """Inputs and outputs of a network. Symbols of shapes are "T", "B", "B+1", "R", "P.{group}", "slots" and
    "pages.{group}".

    `step` has only those arrays of the step contract that the program reads; block tables are
    `block_tables.{group}`. `caches` are pools, under the names of the program's caches. `cache_outputs` maps each cache
    to the output that is the same memory; it is empty where caches are written through their inputs. `weights` are
    those that come as inputs.
    """

    step: Mapping[str, TensorSpec]
    caches: Mapping[str, TensorSpec]
    logits: TensorSpec
    cache_outputs: Mapping[str, str]
    weights: Mapping[str, TensorSpec]

    def inputs(self) -> dict[str, TensorSpec]:
        """All inputs, in order."""
        return {**self.step, **self.caches, **self.weights}


def step_bindings(program: Program) -> dict[str, TensorSpec]:
    """The arrays of the step contract that the program reads, all int32."""
    read = {*program.inputs, *(name for node in program.nodes for name in op_spec(node.op).step_inputs)}
    groups = list(dict.fromkeys(spec.group for spec in program.caches.values() if isinstance(spec, PageSpec)))
    found: dict[str, TensorSpec] = {}
    for name, shape in STEP_SHAPES.items():
        if name == "block_tables":
            found |= {f"{name}.{group}": TensorSpec((shape[0], f"P.{group}"), "int32") for group in groups}
        elif name in read:
            found[name] = TensorSpec(shape, "int32")
    return found


def cache_bindings(program: Program, page_size: int) -> dict[str, TensorSpec]:
    """The pools of all caches."""
    found = {}
    for name, cache in program.caches.items():
        pool = pool_spec(cache, page_size)
        first: Dim = f"pages.{cache.group}" if isinstance(cache, PageSpec) else "slots"
        found[name] = TensorSpec((first, *pool.shape[1:]), pool.dtype)
    return found
