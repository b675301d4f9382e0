"""Cache pools in device memory: where each page and slot lies, and moving them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridtrt.plugins.caches import CacheSpec, PageSpec
from hybridtrt.runtime.gpu.device import Device
from hybridtrt.runtime.gpu.pinned_chunks import PinnedChunks, Saved
from hybridtrt.runtime.runner import RunnerInfo

NAN_BYTE = 0xFF  # a float of any size whose bits are all one is not a number


@dataclass(frozen=True)
class Pool:
    """The pool of one cache: `count` pages or slots of `stride` bytes from `address` on; `shape` is all of it."""

    spec: CacheSpec
    address: int
    count: int
    stride: int
    shape: tuple[int, ...]

    def at(self, number: int) -> int:
        """The address of a page or slot. Raises `ValueError` for a number that the pool does not have."""
        if not 0 <= number < self.count:
            raise ValueError(f"{self.spec.name}: {number} is not in 0..{self.count - 1}")
        return self.address + number * self.stride

    @property
    def size(self) -> int:
        return self.count * self.stride


class Pools:
    """All pools of an engine, zero at the start."""

    def __init__(self, device: Device, info: RunnerInfo) -> None:
        self._device, self._chunks = device, PinnedChunks(device)
        self._all = [_allocate(device, spec, info) for spec in info.caches]
        for pool in self._all:
            device.fill(pool.address, 0, pool.size)

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._all)

    def fill(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int], byte: int) -> None:
        """Set all bytes of these pages (by group) and slots."""
        for pool, number in self._numbered(pages, slots):
            self._device.fill(pool.at(number), byte, pool.stride)

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Copy pages, (source, target) by group."""
        for pool in self._all:
            if isinstance(pool.spec, PageSpec):
                for source, target in copies.get(pool.spec.group, ()):
                    self._device.copy(pool.at(target), pool.at(source), pool.stride)

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Saved:
        """A copy in pinned memory, one page or slot after another."""
        saved = self._chunks.take(sum(pool.stride for pool, _ in self._numbered(pages, slots)))
        place = 0
        for pool, number in self._numbered(pages, slots):
            for begin, piece in saved.pieces(place, pool.stride):
                self._device.download(piece, pool.at(number) + begin)
            place += pool.stride
        self._device.synchronize()
        return saved

    def restore(self, saved: Saved, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Write a copy back to as many pages and slots."""
        place = 0
        for pool, number in self._numbered(pages, slots):
            for begin, piece in saved.pieces(place, pool.stride):
                self._device.upload(pool.at(number) + begin, piece)
            place += pool.stride
        self._device.synchronize()  # the copy may be freed as soon as this returns

    def _numbered(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Iterator[tuple[Pool, int]]:
        for pool in self._all:
            numbers = pages.get(pool.spec.group, ()) if isinstance(pool.spec, PageSpec) else slots
            for number in numbers:
                yield pool, number


def pool_bytes(info: RunnerInfo) -> int:
    """Bytes of all pools."""
    return sum(_stride(spec, info) * _count(spec, info) for spec in info.caches)


def _allocate(device: Device, spec: CacheSpec, info: RunnerInfo) -> Pool:
    count, stride = _count(spec, info), _stride(spec, info)
    lead = (count, info.page_size) if isinstance(spec, PageSpec) else (count,)
    return Pool(spec, device.allocate(count * stride), count, stride, (*lead, *spec.shape))


def _count(spec: CacheSpec, info: RunnerInfo) -> int:
    return info.num_pages[spec.group] if isinstance(spec, PageSpec) else info.num_slots


def _stride(spec: CacheSpec, info: RunnerInfo) -> int:
    return spec.bytes_per_token * info.page_size if isinstance(spec, PageSpec) else spec.bytes_per_slot
