"""Runs the lowered program with the C++ kernels: one call a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.build.lowering import LoweredProgram, PackedWeight, Window
from hybridtrt.build.tactics import Tuned
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.plugins.native.library import Node, Operand, Pool, Program, Weight
from hybridtrt.plugins.program import Program as ProgramSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.runner import RunnerInfo

STORAGE: dict[str, type[np.float32] | type[np.uint16]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}
PAGE_BYTES = 4096
NAN = {"float32": np.nan, "bfloat16": 0x7FC0, "float16": 0x7E00}

Array = NDArray[np.float32] | NDArray[np.uint16]


@dataclass(frozen=True)
class _Saved:
    """Copies of some pages and slots, pool by pool."""

    pages: Mapping[str, list[Array]]  # each [pages saved, page_size, ...]
    states: list[Array]  # each [slots saved, ...]


class CpuRunner:
    """A `Runner` on the C++ executor.

    `program` is what was lowered; `lower` gives the form of it that keeps the named values readable; `weights` the
    bytes of each packed weight. `isa` None takes the widest instruction set of this machine, `tuned` None the
    default tactics. `poison` fills working memory with NaN before every step.
    """

    def __init__(
        self,
        program: ProgramSpec,
        lower: Callable[[Sequence[str]], LoweredProgram],
        weights: Mapping[str, NDArray[np.uint8]],
        info: RunnerInfo,
        threads: int,
        isa: str | None = None,
        tuned: Tuned | None = None,
        poison: bool = False,
    ) -> None:
        self._info = info
        self._spec = program
        self._lower, self._weights = lower, weights
        self._options = (threads, isa, poison)
        self._tuned = tuned
        self._pools: dict[str, Pool] = {}
        self._pages: dict[str, list[Pool]] = {group: [] for group in info.num_pages}
        self._states: list[Pool] = []
        for spec in info.caches:
            lead = (info.num_pages[spec.group], info.page_size) if isinstance(spec, PageSpec) else (info.num_slots,)
            zeros: Any = np.zeros((*lead, *spec.shape), STORAGE[spec.dtype])
            pool = Pool(zeros, spec.dtype)
            self._pools[spec.name] = pool
            (self._pages[spec.group] if isinstance(spec, PageSpec) else self._states).append(pool)
        self._lowered, self._program = self._load(())
        for data in weights.values():
            data[::PAGE_BYTES].max(initial=0)  # mapped now, not one page after another in the first step
        self._traced: tuple[tuple[str, ...], LoweredProgram, Program] | None = None

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def program(self) -> ProgramSpec:
        return self._spec

    @property
    def isa(self) -> str:
        """The instruction set that runs."""
        return self._program.isa

    @property
    def lowered(self) -> LoweredProgram:
        """The program as it runs."""
        return self._lowered

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of each packed weight."""
        return {name: data.nbytes for name, data in self._weights.items()}

    @property
    def native(self) -> Program:
        """The executor's program, with its times."""
        return self._program

    def clear_slots(self, slots: Sequence[int]) -> None:
        for pool in self._states:
            pool.data[list(slots)] = 0

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        for group, pairs in copies.items():
            sources, targets = (list(numbers) for numbers in zip(*pairs, strict=True)) if pairs else ([], [])
            for pool in self._pages[group]:
                pool.data[targets] = pool.data[sources]

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> _Saved:
        return _Saved(
            {group: [pool.data[list(numbers)] for pool in self._pages[group]] for group, numbers in pages.items()},
            [pool.data[list(slots)] for pool in self._states],
        )

    def restore(self, saved: _Saved, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        for pool, state in zip(self._states, saved.states, strict=True):
            pool.data[list(slots)] = state
        for group, numbers in pages.items():
            for pool, page in zip(self._pages[group], saved.pages[group], strict=True):
                pool.data[list(numbers)] = page

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        for pool in self._states:
            pool.data[list(slots)] = NAN[pool.dtype]
        for group, numbers in pages.items():
            for pool in self._pages[group]:
                pool.data[list(numbers)] = NAN[pool.dtype]

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        return self._program.step(batch, self._info.vocab_size)

    def trace(self, batch: StepBatch, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Run one step and return the named values of the program; debugging compares them with another walker's."""
        if self._traced is None or self._traced[0] != tuple(names):
            self._traced = (tuple(names), *self._load(names))
        _, lowered, program = self._traced
        logits = program.step(batch, self._info.vocab_size)
        rows = len(batch.logits_indices)
        kept = {}
        for name in names:
            window = lowered.windows.get(name)
            if window is None:
                kept[name] = logits
                continue
            values = program.value(_operand(window, lowered), batch.num_tokens, rows, lowered.token_width)
            spec = self._spec.values[name]
            whole = spec.dtype != "float32"  # in the arena as int32
            values = values.view(np.int32).astype(np.float32) if whole else values
            kept[name] = values[0] if spec.rows == "1" else values
        return kept

    def close(self) -> None:
        self._program.close()
        if self._traced is not None:
            self._traced[2].close()
        self._pools.clear()
        self._pages.clear()
        self._states.clear()

    def _load(self, keep: Sequence[str]) -> tuple[LoweredProgram, Program]:
        lowered = self._lower(keep)
        threads, isa, poison = self._options
        nodes = [
            Node(
                op=node.op,
                inputs=tuple(_operand(window, lowered) for window in node.inputs),
                outputs=tuple(_operand(window, lowered) for window in node.outputs),
                weights=tuple(self._weight(weight) for weight in node.weights),
                caches=tuple(self._pools[name] for name in node.caches),
                attributes=node.attributes,
            )
            for node in lowered.nodes
        ]
        widths = (lowered.token_width, lowered.logits_width)
        return lowered, Program(nodes, *widths, lowered.groups, threads, isa, poison, lowered.step_width)

    def _weight(self, weight: PackedWeight | tuple[float, ...] | None) -> Weight | None:
        if weight is None:
            return None
        if isinstance(weight, tuple):
            return Weight(np.array(weight, np.float32).view(np.uint8), "float32", (len(weight),))
        tactics = () if self._tuned is None else self._tuned.indices(weight)
        return Weight(self._weights[weight.name], weight.stored.format, weight.shape, weight.stored.group, tactics)


def _operand(window: Window, lowered: LoweredProgram) -> Operand:
    buffer = lowered.buffers.get(window.buffer)
    if buffer is None:
        return Operand(window.buffer, 0, 0, 1, window.dims)  # an array of the step
    if window.buffer == lowered.output:
        return Operand("output", 0, window.column, buffer.width, window.dims)
    return Operand(buffer.rows, buffer.offset, window.column, buffer.row_stride, window.dims)
