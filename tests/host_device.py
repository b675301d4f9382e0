"""A device of host memory: addresses are real, every access is checked, and graphs are replayed from what was captured.

Its engine computes a program with the operators' definitions on the memory that was bound, as TensorRT would on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtrt.plugins.caches import DTYPE_BYTES
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel
from hybridtrt.plugins.step import STEP_INPUTS, StepBatch

STREAM = 7
ALIGNMENT = 256
Bytes = NDArray[np.uint8]


@dataclass
class HostDevice:
    """Implements `Device`. New memory holds garbage; `log` says what went into the stream."""

    memory: int = 1 << 32
    compute_capability: int = 89
    name: str = "host memory"
    stream: int = STREAM
    log: list[str] = field(default_factory=list)
    _regions: dict[int, Bytes] = field(default_factory=dict)
    _pinned: list[Bytes] = field(default_factory=list)
    _capturing: list[Callable[[], None]] | None = None
    _pending: bool = False

    def free_bytes(self) -> int:
        return self.memory - sum(region.nbytes for region in self._regions.values())

    def allocate(self, size: int) -> int:
        raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._regions[raw.ctypes.data + start] = raw[start : start + size]
        return int(raw.ctypes.data) + start

    def pinned(self, size: int) -> Bytes:
        self._pinned.append(np.full(size, 0xFF, np.uint8))
        return self._pinned[-1]

    def at(self, address: int, size: int) -> Bytes:
        """The memory, if it lies within what was allocated at once."""
        start = max((begin for begin in self._regions if begin <= address), default=None)
        assert start is not None, f"{address:#x} was never allocated"
        offset = address - start
        region = self._regions[start]
        assert offset + size <= region.nbytes, f"{size} bytes at {address:#x} leave their allocation"
        return region[offset : offset + size]

    def upload(self, target: int, source: Bytes) -> None:
        self._check_pinned(source)
        self._do("upload", lambda: ctypes.memmove(target, source.ctypes.data, len(self.at(target, source.nbytes))))

    def download(self, target: Bytes, source: int) -> None:
        self._check_pinned(target)
        self._do("download", lambda: ctypes.memmove(target.ctypes.data, source, len(self.at(source, target.nbytes))))

    def copy(self, target: int, source: int, size: int) -> None:
        self._do("copy", lambda: self.at(target, size).__setitem__(slice(None), self.at(source, size)))

    def fill(self, target: int, byte: int, size: int) -> None:
        self._do("fill", lambda: self.at(target, size).fill(byte))

    @property
    def capturing(self) -> bool:
        """Whether what goes into the stream is captured."""
        return self._capturing is not None

    def execute(self, work: Callable[[], None]) -> None:
        """Put a run of an engine into the stream."""
        self._do("execute", work)

    def capture(self, work: Callable[[], None]) -> Any:
        assert self._capturing is None
        self._capturing = []
        work()
        graph, self._capturing = self._capturing, None
        self.log.append("capture")
        return graph

    def replay(self, graph: Any) -> None:
        self.log.append("replay")
        for work in graph:
            work()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def close(self) -> None:
        self._regions.clear()

    def _do(self, what: str, work: Callable[[], Any]) -> None:
        if self._capturing is not None:
            self._capturing.append(work)
            return
        self.log.append(what)
        work()

    def _check_pinned(self, data: Bytes) -> None:
        begin = data.ctypes.data
        assert any(
            whole.ctypes.data <= begin and begin + data.nbytes <= whole.ctypes.data + whole.nbytes
            for whole in self._pinned
        ), "copies run beside Python only from and to pinned memory"


@dataclass
class HostContext:
    """One profile of `HostEngine`. A run takes the addresses and shapes bound when it went into the stream.

    Only what ran before in the same shapes can be captured: TensorRT adapts to new ones in a way that capture forbids.
    """

    engine: HostEngine
    profile: int
    bound: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    ran: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def bind(self, name: str, address: int, shape: Sequence[int]) -> None:
        assert name in self.engine.names, f"the engine has no {name}"
        assert address % ALIGNMENT == 0
        self.bound[name] = address, tuple(shape)

    def can_be_captured(self, stream: int) -> bool:
        return self.engine.can_be_captured

    def execute(self, stream: int) -> None:
        assert stream == STREAM
        assert self.bound.keys() == self.engine.names
        bound = dict(self.bound)
        assert not self.engine.device.capturing or bound == self.ran, "a capture in shapes that did not run just before"
        self.ran = bound
        self.engine.runs.append((self.profile, {name: shape for name, (_, shape) in bound.items()}))
        self.engine.device.execute(lambda: self.engine.run(bound, self.profile))


class HostEngine:
    """Implements `Engine` for a program with its weights inside."""

    def __init__(
        self, device: HostDevice, program: Program, weights: dict[str, Tensor], scratch_bytes: int = 64
    ) -> None:
        self.device, self.scratch_bytes = device, scratch_bytes
        self._program, self._weights = program, weights
        read = {name for node in program.nodes for name in _reads(node)}
        self.outputs = {f"{name}.next": name for name in program.caches}
        self.names = frozenset({*read, *program.caches, *self.outputs, "logits"})
        self.runs: list[tuple[int, dict[str, tuple[int, ...]]]] = []

    can_be_captured = True

    def context(self, profile: int, scratch: int) -> HostContext:
        self.device.at(scratch, self.scratch_bytes)
        return HostContext(self, profile)

    def run(self, bound: dict[str, tuple[int, tuple[int, ...]]], profile: int) -> None:
        for output, cache in self.outputs.items():
            assert bound[output] == bound[cache], "a cache is written in place"
        arrays = {
            name: self._tensor(bound[name], "int32").numpy()
            for name in bound
            if name in STEP_INPUTS or name.startswith("block_tables.")
        }
        rows = len(arrays.get("cu_seqlens", arrays["positions"])) - ("cu_seqlens" in arrays)
        zeros = np.zeros(rows, np.int32)
        batch = StepBatch(
            input_ids=arrays["input_ids"],
            positions=arrays["positions"],
            cu_seqlens=arrays.get("cu_seqlens", np.arange(rows + 1, dtype=np.int32)),
            context_lens=arrays.get("context_lens", zeros),
            state_src=arrays.get("state_src", zeros),
            state_dst=arrays.get("state_dst", zeros),
            logits_indices=arrays["logits_indices"],
            block_tables={name.split(".", 1)[1]: table for name, table in arrays.items() if "." in name},
        )
        if profile == 1:
            assert batch.num_tokens == batch.num_sequences
        pools = {name: self._tensor(bound[name], spec.dtype) for name, spec in self._program.caches.items()}
        values = {"input_ids": torch.from_numpy(batch.input_ids), "positions": torch.from_numpy(batch.positions)}
        step = Step(batch)
        with torch.inference_mode():
            for node in self._program.nodes:
                operands = {role: self._weights[weight] for role, weight in node.weights.items()}
                operands |= {role: pools[cache] for role, cache in node.caches.items()}
                inputs = (values[name] for name in node.inputs)
                found = kernel(node.op, "torch")(step, *inputs, **operands, **node.attributes)
                values |= zip(node.outputs, found if isinstance(found, tuple) else (found,), strict=True)
        self._tensor(bound["logits"], "float32").copy_(values[self._program.outputs[0]])

    def _tensor(self, place: tuple[int, tuple[int, ...]], dtype: str) -> Tensor:
        """The memory at an address as a tensor."""
        address, shape = place
        size = DTYPE_BYTES[dtype] * int(np.prod(shape))
        return torch.from_numpy(self.device.at(address, size)).view(getattr(torch, dtype)).reshape(shape)


def _reads(node: Any) -> set[str]:
    """The arrays of the step that a node reads."""
    from hybridtrt.plugins.registry import op_spec

    own = op_spec(node.op).step_inputs
    tables = {f"block_tables.{node.attributes['group']}"} if "group" in node.attributes else set()
    return {name for name in own if name != "block_tables"} | tables | (set(node.inputs) & {"input_ids", "positions"})
