"""Runs a TensorRT engine as a `Runner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.gpu.decode_buckets import Bucket, DecodeBuckets
from hybridtrt.runtime.gpu.device import Context, Device, Engine
from hybridtrt.runtime.gpu.pinned_chunks import Saved
from hybridtrt.runtime.gpu.pools import NAN_BYTE, Pools
from hybridtrt.runtime.gpu.staging import Staging, max_pages
from hybridtrt.runtime.runner import RunnerInfo

PREFILL, DECODE = 0, 1  # optimization profiles
LOGITS = "logits"


class TensorRTRunner:
    """A `Runner` on a TensorRT engine: pools, arrays of the step and logits lie at fixed addresses.

    A step that only decodes is padded to a bucket, whose launches are a CUDA graph from its second time on. It is
    captured right behind the first: TensorRT must have run in the shapes of a graph since they were last changed. Any
    other step runs in the shapes that it has. While the device works, Python is free to compute the masks of guided
    answers.
    """

    def __init__(
        self,
        info: RunnerInfo,
        device: Device,
        engine: Engine,
        aliases: Mapping[str, str],
        logits_name: str = LOGITS,
        weights: Mapping[str, tuple[int, tuple[int, ...]]] | None = None,
        graphs: bool = True,
    ) -> None:
        """`aliases` names the cache that an output of the engine is; `weights` gives address and shape of each weight
        that is an input. Raises `ValueError` where the engine's inputs and outputs are not those of the step."""
        self._info, self._device, self._logits_name = info, device, logits_name
        self._buckets = DecodeBuckets(info.max_batch_size, max_pages(info))
        self._pools = Pools(device, info)
        self._staging = Staging(device, info, engine.names)
        size = logits_bytes(info)
        self._logits = device.allocate(size)
        self._host_logits = device.pinned(size).view(np.float32).reshape(-1, info.vocab_size)
        scratch = device.allocate(engine.scratch_bytes)
        self._contexts = [engine.context(profile, scratch) for profile in (PREFILL, DECODE)]
        self._graphs: dict[Bucket, Any] = {}
        self._use_graphs = graphs
        fixed = {pool.spec.name: (pool.address, pool.shape) for pool in self._pools} | dict(weights or {})
        fixed |= {output: fixed[cache] for output, cache in aliases.items()}
        for context in self._contexts:
            for name, (address, shape) in fixed.items():
                if name in engine.names:
                    context.bind(name, address, shape)
        unbound = engine.names - fixed.keys() - self._staging.names - {logits_name}
        if unbound:
            raise ValueError(f"the engine has inputs or outputs that nothing is bound to: {', '.join(sorted(unbound))}")

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def clear_slots(self, slots: Sequence[int]) -> None:
        self._pools.fill({}, slots, 0)

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._pools.copy_pages(copies)

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Saved:
        return self._pools.save(pages, slots)

    def restore(self, saved: Saved, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        self._pools.restore(saved, pages, slots)

    def poison(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        self._pools.fill(pages, slots, NAN_BYTE)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        rows = len(batch.logits_indices)
        if rows > self._info.max_logits_rows:
            raise ValueError(f"{rows} tokens want logits; the engine takes {self._info.max_logits_rows} in a step")
        if not rows:  # TensorRT wants a row at least
            batch = replace(batch, logits_indices=np.zeros(1, np.int32))
        bucket = self._buckets.of(batch)
        if bucket is None:
            self._staging.upload(batch)
            self._execute(self._contexts[PREFILL], batch)
        else:
            padded = self._buckets.pad(batch, bucket)
            self._staging.upload(padded)
            self._decode(padded, bucket)
        found = self._host_logits[:rows]
        self._device.download(found.reshape(-1).view(np.uint8), self._logits)
        self._device.synchronize()
        return found.copy()

    def close(self) -> None:
        self._graphs.clear()
        self._contexts.clear()
        self._device.close()

    def _decode(self, batch: StepBatch, bucket: Bucket) -> None:
        context = self._contexts[DECODE]
        if bucket in self._graphs:
            self._device.replay(self._graphs[bucket])
            return
        self._execute(context, batch)
        if self._use_graphs and context.can_be_captured(self._device.stream):
            self._graphs[bucket] = self._device.capture(lambda: context.execute(self._device.stream))

    def _execute(self, context: Context, batch: StepBatch) -> None:
        self._staging.bind(batch, context)
        context.bind(self._logits_name, self._logits, (len(batch.logits_indices), self._info.vocab_size))
        context.execute(self._device.stream)


def logits_bytes(info: RunnerInfo) -> int:
    """Bytes of the logits of a step, on the device and in host memory."""
    return 4 * info.max_logits_rows * info.vocab_size
