"""Matches the weights of a network with the tensors of a checkpoint: each filled, each used, each of its shape."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import torch

from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.model_reader import Model
from hybridtrt.converters.sources import FirstOf, Shape, Source

EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"
COMPARED_ROWS = 4096


def match_sources(model: Model, reader: CheckpointReader) -> dict[str, Source]:
    """The source of every weight of the network, in the spelling that the checkpoint uses.

    Raises `ValueError`, naming tensor and file, for a tensor that is missing, surplus or of the wrong shape or dtype,
    and for a head that contradicts `tie_word_embeddings`.
    """
    rules = model.family.rules(model.config, reader.names)
    table = {name: spec.shape for name, spec in model.config.weight_table().items()}
    shapes = dict(table)
    tied_head = HEAD not in table and not _absent(rules[HEAD], (), reader)
    if tied_head:
        shapes[HEAD] = table[EMBEDDING]
    sources: dict[str, Source] = {}
    needed: dict[str, Shape] = {}
    missing: list[str] = []
    for weight, shape in shapes.items():
        missing += _absent(rules[weight], shape, reader)
        sources[weight] = _choose(rules[weight], shape, reader)
        needed |= sources[weight].tensors(shape)
    surplus = [
        name
        for name in sorted(reader.names - set(needed))
        if not any(fnmatchcase(name, pattern) for pattern in model.ignored)
    ]
    if missing or surplus:
        raise ValueError(_contradiction(missing, surplus, model, reader))
    _check_tensors(needed, model, reader)
    if tied_head:
        _check_tied(sources.pop(HEAD), sources[EMBEDDING], reader, model.source)
    return sources


def place_base_model(model: Model, reader: CheckpointReader) -> None:
    """A model saved without its head has names without the prefix that the whole model gives them: put it back."""
    rule = model.family.rules(model.config, reader.names)[EMBEDDING]
    spellings = rule.alternatives if isinstance(rule, FirstOf) else (rule,)
    names = [name for source in spellings for name, _ in source.tensors(())]
    if any(name in reader.names for name in names):
        return
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts) - 1):
            if ".".join(parts[i:]) in reader.names:
                reader.put_under(".".join(parts[:i]) + ".")
                return


def _choose(rule: Source | FirstOf, shape: Shape, reader: CheckpointReader) -> Source:
    return rule.choose(shape, reader.names, reader.shape) if isinstance(rule, FirstOf) else rule


def _absent(rule: Source | FirstOf, shape: Shape, reader: CheckpointReader) -> list[str]:
    """The tensors of a rule that the checkpoint lacks; one entry for all spellings if it has none of any."""
    wanted = [name for name, _ in _choose(rule, shape, reader).tensors(shape)]
    absent = [name for name in wanted if name not in reader.names]
    if isinstance(rule, FirstOf) and absent == wanted:
        return [" or ".join(next(iter(each.tensors(shape)))[0] for each in rule.alternatives)]
    return absent


def _check_tensors(needed: dict[str, Shape], model: Model, reader: CheckpointReader) -> None:
    for name, shape in needed.items():
        if reader.shape(name) != shape:
            raise ValueError(
                f"{reader.path(name)}: {name} has shape {list(reader.shape(name))}, "
                f"expected {list(shape)} by {model.source}"
            )
        reader.dtype(name)


def _contradiction(missing: list[str], surplus: list[str], model: Model, reader: CheckpointReader) -> str:
    """One line on what differs, starting with the first layer in which both sides differ if there is one."""
    parts = []
    both = {_layer(name) for name in missing} & {_layer(name) for name in surplus}
    layer = min((index for index in both if index is not None), default=None)
    if layer is not None:
        missing = sorted(missing, key=lambda name: _layer(name) != layer)
        surplus = sorted(surplus, key=lambda name: _layer(name) != layer)
        parts.append(f"layer {layer} does not match its weights")
    if missing:
        parts.append(f"missing tensor {_some(missing)}")
    if surplus:
        parts.append(f"surplus tensor {_some(surplus)}")
    return f"{reader.folder}: {', '.join(parts)} (the network is described by {model.source})"


def _layer(name: str) -> int | None:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_tied(head: Source, embedding: Source, reader: CheckpointReader, source: str) -> None:
    (head_name, _), (embedding_name, _) = next(head.tensors(())), next(embedding.tensors(()))
    a, b = reader.read(head_name), reader.read(embedding_name)
    starts = range(0, len(a), COMPARED_ROWS)
    if not all(torch.equal(a[i : i + COMPARED_ROWS].float(), b[i : i + COMPARED_ROWS].float()) for i in starts):
        raise ValueError(
            f"{reader.path(head_name)}: {head_name} differs from {embedding_name}, "
            f"but tie_word_embeddings is true ({source})"
        )
