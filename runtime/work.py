"""What a step has to read and compute, node by node, as the operators' specs count it.

Bytes are those of weights, as they lie in memory, and of caches; values between nodes mostly stay in the processor.
Of experts and embeddings only some rows are read: as many as even and independent choices would touch on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hybridtrt.build.lowering import LoweredNode, LoweredProgram, PackedWeight, Window
from hybridtrt.plugins.caches import CacheSpec, PageSpec
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import Load, OpSpec, TensorSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.runner import Runner, TracingRunner


@dataclass(frozen=True)
class StepShape:
    """The tokens of each sequence before a step and in it, and the rows that want logits."""

    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    logits_rows: int

    @classmethod
    def of(cls, batch: StepBatch) -> StepShape:
        ends = batch.cu_seqlens.tolist()
        counts = tuple(end - begin for begin, end in pairwise(ends))
        return cls(tuple(batch.context_lens.tolist()), counts, len(batch.logits_indices))

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def attended(self, window: int | None = None) -> int:
        """Keys that each token sees, itself included, summed over the tokens."""
        total = 0
        for context, count in zip(self.contexts, self.counts, strict=True):
            whole = count if window is None else min(max(window - context, 0), count)  # tokens that see all before them
            total += whole * context + whole * (whole + 1) // 2 + (count - whole) * (window or 0)
        return total

    def visible(self, window: int | None = None, limit: int | None = None) -> int:
        """Keys that any token sees, summed over the sequences."""
        total = 0
        for context, count in zip(self.contexts, self.counts, strict=True):
            first = 0 if window is None else max(context - window + 1, 0)
            end = context + count
            total += max((end if limit is None else min(end, limit)) - first, 0)
        return total


@dataclass(frozen=True)
class Work:
    """Bytes of weights and caches read and written, and floating point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class CountedNode:
    """A node with all that its work depends on."""

    spec: OpSpec
    name: str
    inputs: list[TensorSpec]
    weights: Mapping[str, TensorSpec]
    weight_bytes: Mapping[str, int]  # as stored, by role
    caches: tuple[CacheSpec, ...]
    attributes: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The mixer or FFN that it belongs to, `embedding`, or `head`: all after the last layer."""
        parts = self.name.split(".")
        if parts[0] == "layers":
            return parts[2]
        return "embedding" if parts[0].startswith(("embedding", "ropes")) else "head"

    def work(self, shape: StepShape) -> Work:
        """What the node does in a step."""
        pages = [cache for cache in self.caches if isinstance(cache, PageSpec)]
        attended = shape.attended(pages[0].window if pages else None)
        load = Load(shape.tokens, len(shape.counts), shape.logits_rows, attended)
        moved = sum(size * self._share_read(role, load) for role, size in self.weight_bytes.items())
        for cache in self.caches:
            if isinstance(cache, PageSpec):
                moved += (shape.visible(cache.window, cache.limit) + shape.tokens) * cache.bytes_per_token
            else:
                moved += 2 * len(shape.counts) * cache.bytes_per_slot
        return Work(moved, self.spec.flops(self.inputs, self.weights, self.attributes, load))

    def _share_read(self, role: str, load: Load) -> float:
        """The part of a weight that a step reads."""
        if self.spec.rows_read is None:
            return 1.0
        one = Load(1, 1, 1)
        rows = self.spec.rows_read(self.inputs, self.weights, self.attributes, one)
        share = min(rows / int(self.weights[role].shape[0]), 1.0)
        return 1.0 - float((1.0 - share) ** load.tokens)


def counted_nodes(runner: Runner) -> list[CountedNode]:
    """The nodes of a runner in the order in which they run. Raises `ValueError` for a runner without a program."""
    if isinstance(runner, CpuRunner):
        caches = {spec.name: spec for spec in runner.info.caches}
        return [_lowered(node, runner.lowered, runner.weight_bytes, caches) for node in runner.lowered.nodes]
    if isinstance(runner, TracingRunner):
        program = runner.program
        return [
            CountedNode(
                spec=op_spec(node.op),
                name=node.name,
                inputs=[program.values[name] for name in node.inputs],
                weights={role: program.weights[name] for role, name in node.weights.items()},
                weight_bytes={
                    role: 4 * math.prod(int(dim) for dim in program.weights[name].shape)  # torch holds float32
                    for role, name in node.weights.items()
                },
                caches=tuple(program.caches[name] for name in node.caches.values()),
                attributes=node.attributes,
            )
            for node in program.nodes
        ]
    raise ValueError(f"the work of a {type(runner).__name__} is not known")


def total(works: Iterable[Work]) -> Work:
    """The sum."""
    return sum(works, Work())


def _lowered(
    node: LoweredNode, lowered: LoweredProgram, weight_bytes: Mapping[str, int], caches: Mapping[str, CacheSpec]
) -> CountedNode:
    spec = op_spec(node.op)
    roles = (*spec.weights, *spec.optional_weights)
    weights = {
        role: weight for role, weight in zip(roles, node.weights, strict=False) if isinstance(weight, PackedWeight)
    }

    def tensor(window: Window) -> TensorSpec:
        buffer = lowered.buffers.get(window.buffer)
        return TensorSpec(("T" if buffer is None else buffer.rows, *window.dims))

    return CountedNode(
        spec=spec,
        name=node.name,
        inputs=[tensor(window) for window in node.inputs],
        weights={role: TensorSpec(weight.shape) for role, weight in weights.items()},
        weight_bytes={role: weight_bytes[weight.name] for role, weight in weights.items()},
        caches=tuple(caches[name] for name in node.caches),
        attributes=dict(_attributes(spec, node.attributes)),
    )


def _attributes(spec: OpSpec, numbers: Iterable[float]) -> Iterable[tuple[str, Any]]:
    """Attributes by name again, as far as they count: without lists and the page group."""
    for name, number in zip(spec.attributes, numbers, strict=True):
        if not math.isnan(number) and name != "group":
            yield name, spec.choices[name][int(number)] if name in spec.choices else number
