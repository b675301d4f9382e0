"""The tensors of a Hugging Face folder: safetensors, one file or shards with an index, memory-mapped.

Pickle files are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hybridtrt.converters.safetensors_file import open_safetensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CHECKED_ELEMENTS = 1 << 22
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class CheckpointReader:
    """The `names` of all tensors at once; shape, dtype and data tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        """Open every shard. Raises `ValueError` for a folder whose files are damaged or contradict each other."""
        self.folder = folder
        index = _read_index(folder)
        files = _shards(folder, index)
        self._shard_of: dict[str, str] = {}
        self._open = {file: open_safetensors(folder / file, "pt") for file in files}
        for file, handle in self._open.items():
            self._add(file, handle.keys(), index)
        absent = sorted(set(index or ()) - set(self._shard_of))
        if index and absent:
            raise ValueError(
                f"{folder / index[absent[0]]}: lacks the tensor {absent[0]}, which {INDEX} puts there"
                f"{_and_more(len(absent))}"
            )
        self.names = frozenset(self._shard_of)
        self._prefix = ""

    def put_under(self, prefix: str) -> None:
        """Read the tensors of a base model, which lie under `prefix` in the whole one, by their names there."""
        self._prefix = prefix
        self.names = frozenset(prefix + name for name in self.names)

    def _add(self, file: str, names: Iterable[str], index: dict[str, str] | None) -> None:
        for name in names:
            if index is not None and index.get(name) != file:
                place = f"{INDEX} puts it in {index[name]}" if name in index else f"{INDEX} does not list it"
                raise ValueError(f"{self.folder / file}: holds the tensor {name}, but {place}")
            if name in self._shard_of:
                raise ValueError(f"{self.folder / file}: holds the tensor {name}, but so does {self._shard_of[name]}")
            self._shard_of[name] = file

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """The dtype as safetensors spells it."""
        return str(self._slice(name).get_dtype())

    def dtype(self, name: str) -> str:
        """Raises `ValueError` for a dtype that cannot be converted."""
        stored = self.stored_dtype(name)
        if stored not in DTYPES:
            raise ValueError(f"{self.path(name)}: {name} has dtype {stored}, expected {', '.join(DTYPES)}")
        return DTYPES[stored]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, as a view of the mapped file."""
        stored = name.removeprefix(self._prefix)
        tensor: torch.Tensor = self._open[self._shard_of[stored]].get_tensor(stored)
        return tensor

    def read_finite(self, name: str) -> torch.Tensor:
        """The tensor. Raises `ValueError`, naming it, if a value is NaN or infinite."""
        tensor = self.read(name)
        if any(not _finite(part) for part in tensor.reshape(-1).split(CHECKED_ELEMENTS) if part.numel()):
            raise ValueError(f"{self.path(name)}: {name} holds values that are NaN or infinite")
        return tensor

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._shard_of[name.removeprefix(self._prefix)]

    def _slice(self, name: str) -> Any:
        stored = name.removeprefix(self._prefix)
        return self._open[self._shard_of[stored]].get_slice(stored)


def _finite(values: torch.Tensor) -> bool:
    """By their bits without the sign: infinity has the smallest that are not finite."""
    integers = torch.int16 if values.element_size() == 2 else torch.int32
    infinity = torch.full((), torch.inf, dtype=values.dtype).view(integers)
    return bool((values.view(integers) & torch.iinfo(integers).max).amax() < infinity)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name to shard; None if there is no index."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: is no index with a weight_map ({type(error).__name__}: {error})") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{path}: weight_map has {shard!r}, expected the name of a file in the same folder")
    return dict(weight_map)


def _shards(folder: Path, index: dict[str, str] | None) -> list[str]:
    """The files to open, sorted. Every safetensors file of the folder must be one of them."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if index is not None:
        expected = sorted(set(index.values()))
        missing = sorted(set(expected) - set(found))
        if missing:
            raise ValueError(f"{folder / missing[0]}: no such file, but {INDEX} names it{_and_more(len(missing))}")
    elif SINGLE in found:
        expected = [SINGLE]
    elif found:
        expected = found
    else:
        raise _no_safetensors(folder)
    stray = sorted(set(found) - set(expected))
    if stray:
        named_by = INDEX if index is not None else f"no {INDEX}, and {SINGLE} is there"
        raise ValueError(f"{folder / stray[0]}: stray file, not named by the index ({named_by}){_and_more(len(stray))}")
    return expected


def _no_safetensors(folder: Path) -> ValueError:
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ValueError(
            f"{folder / pickles[0]}: pickle files are never loaded, as they can run code; expected safetensors"
        )
    return ValueError(f"{folder}: no *.safetensors file")


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
