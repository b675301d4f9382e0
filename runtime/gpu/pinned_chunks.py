"""Host memory for what is swapped out: pinned chunks that are kept and used again, as locking pages takes long."""

from __future__ import annotations

from collections.abc import Iterator

from hybridtrt.runtime.gpu.device import Bytes, Device

CHUNK = 1 << 20  # bytes


class Saved:
    """Bytes in chunks, one after another. The chunks are free again when nobody refers to it any more."""

    def __init__(self, chunks: list[Bytes], free: list[Bytes]) -> None:
        self._chunks, self._free = chunks, free

    def pieces(self, start: int, size: int) -> Iterator[tuple[int, Bytes]]:
        """The memory of `size` bytes from `start` on: pieces, each with where it begins behind `start`."""
        done = 0
        while done < size:
            number, place = divmod(start + done, CHUNK)
            count = min(size - done, CHUNK - place)
            yield done, self._chunks[number][place : place + count]
            done += count

    def __del__(self) -> None:
        self._free.extend(self._chunks)


class PinnedChunks:
    """As many chunks as were ever in use at once: that is `swap_bytes`, and less than a chunk a sequence besides."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Bytes] = []

    def take(self, size: int) -> Saved:
        """Room for `size` bytes."""
        count = -(-size // CHUNK)
        return Saved([self._free.pop() if self._free else self._device.pinned(CHUNK) for _ in range(count)], self._free)
