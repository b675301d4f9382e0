"""Walks the program with torch kernels: the `reference` definitions or the vectorised `torch` ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.runner import RunnerInfo


@dataclass(frozen=True)
class _Call:
    """One node with everything bound that does not change from step to step."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operands: Mapping[str, Any]
    dead: tuple[str, ...]  # values that nothing reads after this node


@dataclass(frozen=True)
class _Saved:
    """Copies of some pages and slots, pool by pool."""

    pages: Mapping[str, list[Tensor]]  # each [pages saved, page_size, ...]
    states: list[Tensor]  # each [slots saved, ...]


class TorchRunner:
    """A `Runner` on torch. Whatever the weights are stored in, it computes in `dtype`: float32, or float64 in tests."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        info: RunnerInfo,
        walker: str = "torch",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._info = info
        self._program = program
        held = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self._pages: dict[str, list[Tensor]] = {group: [] for group in info.num_pages}
        self._states: list[Tensor] = []
        pools: dict[str, Tensor] = {}
        for spec in program.caches.values():
            pool_dtype = dtype if spec.dtype == "float32" else getattr(torch, spec.dtype)
            if isinstance(spec, PageSpec):
                shape = (info.num_pages[spec.group], info.page_size, *spec.shape)
                pools[spec.name] = torch.zeros(shape, dtype=pool_dtype)
                self._pages[spec.group].append(pools[spec.name])
            elif isinstance(spec, StateSpec):
                pools[spec.name] = torch.zeros((info.num_slots, *spec.shape), dtype=pool_dtype)
                self._states.append(pools[spec.name])
        self._calls = [
            _Call(
                name=node.name,
                function=kernel(node.op, walker),
                inputs=node.inputs,
                outputs=node.outputs,
                operands={
                    **{role: held[weight] for role, weight in node.weights.items()},
                    **{role: pools[cache] for role, cache in node.caches.items()},
                    **node.attributes,
                },
                dead=dead,
            )
            for node, dead in zip(program.nodes, program.dead_after(), strict=True)
        ]

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def program(self) -> Program:
        return self._program

    def clear_slots(self, slots: Sequence[int]) -> None:
        for pool in self._states:
            pool[list(slots)] = 0.0

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        for group, pairs in copies.items():
            sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
            for pool in self._pages[group]:
                pool[targets] = pool[sources]

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> _Saved:
        return _Saved(
            pages={group: [pool[list(numbers)] for pool in self._pages[group]] for group, numbers in pages.items()},
            states=[pool[list(slots)] for pool in self._states],
        )

    def restore(self, saved: _Saved, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        for pool, state in zip(self._states, saved.states, strict=True):
            pool[list(slots)] = state
        for group, numbers in pages.items():
            for pool, page in zip(self._pages[group], saved.pages[group], strict=True):
                pool[list(numbers)] = page

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        for pool in self._states:
            pool[list(slots)] = torch.nan
        for group, numbers in pages.items():
            for pool in self._pages[group]:
                pool[list(numbers)] = torch.nan

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        (output,) = self._program.outputs
        return self.trace(batch, (output,))[output]

    @torch.inference_mode()
    def trace(self, batch: StepBatch, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Run one step and return the named values of the program; debugging compares them with another walker's."""
        step = Step(batch)
        values: dict[str, Tensor] = {"input_ids": step.input_ids, "positions": step.positions}
        kept: dict[str, NDArray[np.float32]] = {}
        for call in self._calls:
            result = call.function(step, *(values[name] for name in call.inputs), **call.operands)
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(call.outputs, results, strict=True))
            kept |= {name: values[name].float().numpy() for name in call.outputs if name in names}
            for name in call.dead:
                del values[name]
        return kept

    def close(self) -> None:
        self._calls.clear()
        self._states.clear()
        self._pages.clear()
