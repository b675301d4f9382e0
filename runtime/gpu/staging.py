"""The arrays of a step in one block: written to pinned memory and uploaded by one copy."""

from __future__ import annotations

import math

import numpy as np

from hybridtrt.plugins.caches import PageSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.gpu.device import Bytes, Context, Device
from hybridtrt.runtime.runner import RunnerInfo

ALIGNMENT = 256
TABLE = "block_tables."


class Staging:
    """Every array has a fixed place, large enough for the largest step, so that graphs find it where it was."""

    def __init__(self, device: Device, info: RunnerInfo, names: frozenset[str]) -> None:
        """`names` are the arrays that the engine takes; block tables are called `block_tables.{group}`."""
        self._places: dict[str, int] = {}
        self.size = 0
        for name, size in array_bytes(info).items():
            if name in names:
                self._places[name] = self.size
                self.size += size
        self._device = device
        self._host: Bytes = device.pinned(self.size)
        self.address = device.allocate(self.size)

    @property
    def names(self) -> frozenset[str]:
        """The arrays that have a place."""
        return frozenset(self._places)

    def upload(self, batch: StepBatch) -> None:
        """Copy the arrays of a step to the device. The copy before must be over."""
        end = 0
        for name, place in self._places.items():
            array = _array(batch, name)
            end = place + array.nbytes
            self._host[place:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if end:
            self._device.upload(self.address, self._host[:end])

    def bind(self, batch: StepBatch, context: Context) -> None:
        """Bind every array at its place, in the shape that it has in this step."""
        for name, place in self._places.items():
            context.bind(name, self.address + place, _array(batch, name).shape)


def array_bytes(info: RunnerInfo) -> dict[str, int]:
    """What each array takes in the largest step, with padding to the next one."""
    tokens, rows = (info.max_num_tokens,), (info.max_batch_size,)
    most = {
        "input_ids": tokens,
        "positions": tokens,
        "logits_indices": (info.max_logits_rows,),
        "cu_seqlens": (info.max_batch_size + 1,),
        "context_lens": rows,
        "state_src": rows,
        "state_dst": rows,
        **{TABLE + group: (info.max_batch_size, pages) for group, pages in sorted(max_pages(info).items())},
    }
    return {name: -(-4 * math.prod(shape) // ALIGNMENT) * ALIGNMENT for name, shape in most.items()}


def max_pages(info: RunnerInfo) -> dict[str, int]:
    """Pages in the longest row of each group's block table."""
    limits = {spec.group: spec.limit for spec in info.caches if isinstance(spec, PageSpec)}
    longest = info.max_seq_len
    return {
        group: -(-(longest if limit is None else min(limit, longest)) // info.page_size)
        for group, limit in limits.items()
    }


def _array(batch: StepBatch, name: str) -> np.ndarray:  # type: ignore[type-arg]
    found = batch.block_tables[name.removeprefix(TABLE)] if name.startswith(TABLE) else getattr(batch, name)
    return np.asarray(found, np.int32)
