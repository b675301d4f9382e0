"""The compiled library by ctypes: programs of nodes, and steps through them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.step import StepBatch

LIBRARY = Path(__file__).with_name("_cpu.so")
ISAS = ("base", "avx2", "avx512", "avx512bf16")  # from the plainest to the widest
FORMATS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "panel_float32": 16,
    "panel_bfloat16": 17,
    "panel_int8": 18,
    "panel_int4": 19,
    "panel_bfloat16_rounded": 20,
}
TACTIC_RANGES = 5  # of the rows of a product, as in tactics.h
SPACES = ("T", "R", "1", "input_ids", "positions", "output", "external_T", "external_R", "external_1")


class _Operand(Structure):
    _fields_ = [
        ("space", c_int64),
        ("offset", c_int64),
        ("column", c_int64),
        ("row_stride", c_int64),
        ("rank", c_int64),
        ("dims", c_int64 * 3),
    ]


class _Weight(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("format", c_int64),
        ("group", c_int64),
        ("rank", c_int64),
        ("dims", c_int64 * 3),
        ("tactics", c_int64 * TACTIC_RANGES),
    ]


class _Cache(Structure):
    _fields_ = [("data", c_void_p), ("format", c_int64), ("rank", c_int64), ("dims", c_int64 * 5)]


class _Node(Structure):
    _fields_ = [
        ("op", c_char_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("num_weights", c_int64),
        ("num_caches", c_int64),
        ("num_attributes", c_int64),
        ("inputs", POINTER(_Operand)),
        ("outputs", POINTER(_Operand)),
        ("weights", POINTER(_Weight)),
        ("caches", POINTER(_Cache)),
        ("attributes", POINTER(c_double)),
    ]


class _Options(Structure):
    _fields_ = [
        ("threads", c_int64),
        ("isa", c_int64),
        ("poison", c_int64),
        ("token_width", c_int64),
        ("logits_width", c_int64),
        ("step_width", c_int64),
    ]


_STEP_ARRAYS = (
    "input_ids",
    "positions",
    "cu_seqlens",
    "context_lens",
    "state_src",
    "state_dst",
    "logits_indices",
)


_arrays_of: Callable[[StepBatch], tuple[Any, ...]] = attrgetter(*_STEP_ARRAYS)


class _Step(Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("num_logits", c_int64),
        ("num_tables", c_int64),
        *((name, c_void_p) for name in _STEP_ARRAYS),
        ("block_tables", POINTER(c_void_p)),
        ("table_widths", POINTER(c_int64)),
        ("token_slots", c_void_p),
        ("token_rows", POINTER(c_int32)),
    ]


@dataclass(frozen=True)
class Operand:
    """A value as a window of the arena: `space` is one of `SPACES`, numbers are counted in float32.

    In a step of n rows the buffer begins at n * offset and has `row_stride` numbers a row, of which the window begins
    at `column` and has the given dimensions (without the rows). Spaces "1" have one row in a step of any size. The
    `external` spaces are memory of the caller, and the offset is its address.
    """

    space: str
    offset: int
    column: int
    row_stride: int
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight in memory: `data` holds the bytes of a `FORMATS` layout of `shape`.

    `tactics` has, for each range of rows of a product with it, the index of one in `tactics.h`; () is the defaults.
    """

    data: NDArray[np.uint8]
    format: str
    shape: tuple[int, ...]
    group: int = 0
    tactics: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pool:
    """A cache pool, `[pages or slots, ...]`: float32, or 16-bit numbers as uint16 with the dtype's name."""

    data: NDArray[np.float32] | NDArray[np.uint16]
    dtype: str


@dataclass(frozen=True)
class Node:
    """One node; lists are in the order of the operator's spec. An absent weight is None, an absent attribute NaN."""

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    weights: tuple[Weight | None, ...]
    caches: tuple[Pool, ...]
    attributes: tuple[float, ...]


@cache
def load_library(path: Path | None = None) -> ctypes.CDLL:
    """The library of this installation, or of `path` or the environment's HYBRIDTRT_LIBRARY.

    Raises `ValueError` with one line where it is missing or does not load.
    """
    named = os.environ.get("HYBRIDTRT_LIBRARY")
    path = Path(named or path or LIBRARY)
    if not path.is_file():
        uncompiled = "the C++ kernels were not compiled when hybridtrt was installed"
        raise ValueError(f"{path} is missing: {'HYBRIDTRT_LIBRARY names it' if named else uncompiled}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ValueError(f"{path} does not load: {error}") from None
    if not hasattr(library, "ht_create"):
        raise ValueError(f"{path} is not the library of hybridtrt's kernels")
    library.ht_supported.argtypes = [c_int64]
    library.ht_create.argtypes = [POINTER(_Options), POINTER(_Node), c_int64, c_char_p, c_int64]
    library.ht_create.restype = c_void_p
    library.ht_step.argtypes = [c_void_p, POINTER(_Step), c_void_p]
    library.ht_arena.argtypes = [c_void_p]
    library.ht_arena.restype = c_void_p
    library.ht_working_bytes.argtypes = [c_void_p]
    library.ht_working_bytes.restype = c_int64
    library.ht_profile.argtypes = [c_void_p, c_int64]
    library.ht_times.argtypes = [c_void_p, c_void_p]
    library.ht_free.argtypes = [c_void_p]
    for function in (library.ht_profile, library.ht_times, library.ht_free):
        function.restype = None
    return library


def chosen_isa(name: str | None = None) -> str:
    """The instruction set of this name, or of HYBRIDTRT_ISA, or the widest. Raises `ValueError` if it does not run."""
    supported = supported_isas()
    isa = name or os.environ.get("HYBRIDTRT_ISA") or supported[-1]
    if isa not in ISAS:
        raise ValueError(f"instruction set {isa!r} is not known; known: {', '.join(ISAS)}")
    if isa not in supported:
        raise ValueError(f"this machine does not run {isa}; it runs {', '.join(supported)}")
    return isa


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine runs and the library holds, plainest first."""
    library = load_library()
    return tuple(isa for i, isa in enumerate(ISAS) if library.ht_supported(i))


class Program:
    """Nodes that run together in one call a step.

    `token_width` and `logits_width` are the numbers of the arena for each token and each row that wants logits, and
    `step_width` those of a step of any size; page group `i` of the step is `groups[i]`. With `poison` the arena and all
    scratch memory are NaN wherever nothing has written yet, which tests use. Raises `ValueError` for an instruction set
    that this machine does not run.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        token_width: int,
        logits_width: int,
        groups: Sequence[str],
        threads: int,
        isa: str | None = None,
        poison: bool = False,
        step_width: int = 0,
    ) -> None:
        self._handle = None
        self._kept: list[object] = [nodes]  # whose memory the program uses
        self._library = load_library()
        self.isa = isa = chosen_isa(isa)
        self.seconds = 0.0  # of the last step
        self._sizes: tuple[int, ...] = ()  # rows of logits and numbers of each array of the last step
        self._packed = np.empty(0, np.int32)  # these arrays, one after another
        self._step = _Step()  # as the library reads them
        self._groups = tuple(groups)
        self._num_nodes = len(nodes)
        self._step_width = step_width
        options = _Options(threads, ISAS.index(isa), poison, token_width, logits_width, step_width)
        message = ctypes.create_string_buffer(500)
        array = (_Node * len(nodes))(*(_node(node) for node in nodes))
        self._handle = self._library.ht_create(byref(options), array, len(nodes), message, len(message))
        if not self._handle:
            raise ValueError(message.value.decode())

    def step(self, batch: StepBatch, vocab_size: int) -> NDArray[np.float32]:
        """Run one step and return logits `[R, vocab_size]`. Raises `MemoryError` where the arena does not fit."""
        tables = [batch.block_tables[group] for group in self._groups]
        asked = [] if batch.token_slots is None else [batch.token_slots]
        arrays = [*_arrays_of(batch), *(table.ravel() for table in tables), *asked]
        sizes = (len(batch.logits_indices), *map(len, arrays))
        if self._sizes != sizes:
            self._sizes, self._packed = sizes, np.empty(sum(sizes[1:]), np.int32)
            self._step = _step(self._packed, sizes, len(tables), bool(asked))
        np.concatenate(arrays, out=self._packed)
        logits = np.empty((sizes[0], vocab_size), np.float32)
        started = time.perf_counter()
        failed = self._library.ht_step(self._handle, byref(self._step), logits.ctypes.data)
        self.seconds = time.perf_counter() - started
        if failed:
            raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")
        return logits

    def value(self, operand: Operand, tokens: int, rows: int, token_width: int) -> NDArray[np.float32]:
        """A copy of a value after a step of `tokens` tokens and `rows` rows of logits."""
        before = {"1": 0, "T": self._step_width, "R": self._step_width + token_width * tokens}
        count = {"1": 1, "T": tokens, "R": rows}[operand.space]
        start = before[operand.space] + operand.offset * count
        address = self._library.ht_arena(self._handle) + 4 * start
        raw = np.ctypeslib.as_array(ctypes.cast(address, POINTER(ctypes.c_float)), (count, operand.row_stride))
        width = int(np.prod(operand.dims, dtype=int))
        return raw[:, operand.column : operand.column + width].reshape(count, *operand.dims).copy()

    @property
    def working_bytes(self) -> int:
        """Bytes of the arena and of the kernels' scratch memory so far."""
        return int(self._library.ht_working_bytes(self._handle))

    def profile(self, on: bool) -> None:
        """Begin to time the nodes, or stop; either sets the times back."""
        self._library.ht_profile(self._handle, on)

    def times(self) -> NDArray[np.int64]:
        """The nanoseconds of each node since `profile`."""
        times = np.zeros(self._num_nodes, np.int64)
        self._library.ht_times(self._handle, times.ctypes.data)
        return times

    def close(self) -> None:
        """End the threads and free the arena."""
        if self._handle:
            self._library.ht_free(self._handle)
            self._handle = None
        self._kept.clear()

    def __del__(self) -> None:
        self.close()


def _step(packed: NDArray[np.int32], sizes: Sequence[int], num_tables: int, with_slots: bool) -> _Step:
    """A step of `sizes[0]` rows of logits whose arrays, of the other sizes, lie in `packed` one after another."""
    num_logits, *lengths = sizes
    *places, _ = accumulate((length * packed.itemsize for length in lengths), initial=packed.ctypes.data)
    of = dict(zip(_STEP_ARRAYS, lengths, strict=False))
    first, end = len(_STEP_ARRAYS), len(_STEP_ARRAYS) + num_tables
    widths = (length // max(of["context_lens"], 1) for length in lengths[first:end])
    return _Step(
        of["input_ids"],
        of["context_lens"],
        num_logits,
        num_tables,
        *places[:first],
        (c_void_p * num_tables)(*places[first:end]),
        (c_int64 * num_tables)(*widths),
        places[end] if with_slots else None,
    )


def _operand(operand: Operand) -> _Operand:
    dims = (c_int64 * 3)(*operand.dims)
    return _Operand(
        SPACES.index(operand.space), operand.offset, operand.column, operand.row_stride, len(operand.dims), dims
    )


def _weight(weight: Weight | None) -> _Weight:
    if weight is None:
        return _Weight()
    shape = (c_int64 * 3)(*weight.shape)
    tactics = (c_int64 * TACTIC_RANGES)(*weight.tactics)
    return _Weight(weight.data.ctypes.data, FORMATS[weight.format], weight.group, len(weight.shape), shape, tactics)


def _cache(pool: Pool) -> _Cache:
    shape = pool.data.shape
    return _Cache(pool.data.ctypes.data, FORMATS[pool.dtype], len(shape), (c_int64 * 5)(*shape))


def _node(node: Node) -> _Node:
    operands = [_operand(operand) for operand in (*node.inputs, *node.outputs)]
    array = (_Operand * len(operands))(*operands)
    outputs = byref(array, len(node.inputs) * ctypes.sizeof(_Operand))
    return _Node(
        node.op.encode(),
        len(node.inputs),
        len(node.outputs),
        len(node.weights),
        len(node.caches),
        len(node.attributes),
        ctypes.cast(array, POINTER(_Operand)),
        ctypes.cast(outputs, POINTER(_Operand)),
        (_Weight * len(node.weights))(*(_weight(weight) for weight in node.weights)),
        (_Cache * len(node.caches))(*(_cache(pool) for pool in node.caches)),
        (c_double * len(node.attributes))(*node.attributes),
    )
