"""What the TensorRT runner needs of a GPU: memory, copies in a stream, graphs, and an engine to execute.

`CudaDevice` and `TensorRTEngine` are the real ones; tests have a device of host memory that computes with the
definitions of the operators, so that all that the runner does is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Device(Protocol):
    """One GPU with one stream. Addresses are whole numbers; everything but `allocate` goes into the stream."""

    @property
    def name(self) -> str:
        """What the GPU is called."""

    @property
    def compute_capability(self) -> int:
        """As 89 for 8.9."""

    @property
    def stream(self) -> int:
        """The handle of the stream."""

    def free_bytes(self) -> int:
        """Device memory that is left."""

    def allocate(self, size: int) -> int:
        """The address of so many bytes of device memory, aligned to 256; they live until `close`."""

    def pinned(self, size: int) -> Bytes:
        """Page-locked host memory."""

    def upload(self, target: int, source: Bytes) -> None:
        """Copy from pinned memory, which must stay as it is until `synchronize`."""

    def download(self, target: Bytes, source: int) -> None:
        """Copy to pinned memory, there after `synchronize`."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within device memory."""

    def fill(self, target: int, byte: int, size: int) -> None:
        """Set bytes."""

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` puts into the stream; it is not run."""

    def replay(self, graph: Any) -> None:
        """Run a graph again."""

    def synchronize(self) -> None:
        """Wait until the stream is empty. Other Python threads run meanwhile."""

    def close(self) -> None:
        """Give all memory back."""


class Context(Protocol):
    """An engine with one optimization profile, ready to run."""

    def bind(self, name: str, address: int, shape: Sequence[int]) -> None:
        """Say where an input or an output lies; of an output the shape is not needed."""

    def can_be_captured(self, stream: int) -> bool:
        """Whether a graph may be made of a run in the shapes that are bound."""

    def execute(self, stream: int) -> None:
        """Put one run into the stream. Raises `ValueError` where TensorRT refuses, with its words."""


class Engine(Protocol):
    """A deserialised engine."""

    @property
    def names(self) -> frozenset[str]:
        """All inputs and outputs."""

    @property
    def scratch_bytes(self) -> int:
        """Device memory that a context needs while it runs; contexts that do not run at once may share it."""

    def context(self, profile: int, scratch: int) -> Context:
        """A context on a profile, which uses the memory at `scratch`."""
