"""How a model's weights are stored for a GPU: dtypes, matrices in few bits, and the bytes of all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from hybridtrt.build.tensorrt.dtypes import NetworkDtypes, network_dtypes
from hybridtrt.build.tensorrt.quantization import Quantization
from hybridtrt.build.tensorrt.weights import Read, StoredWeight
from hybridtrt.plugins.caches import DTYPE_BYTES
from hybridtrt.plugins.linear.panel_layout import PANEL_ROLES
from hybridtrt.plugins.spec import TensorSpec

if TYPE_CHECKING:
    from hybridtrt.build.engine import EngineConfig

_BITS = {**{name: 8 * size for name, size in DTYPE_BYTES.items()}, "int4": 4}


def dtypes_of(config: EngineConfig) -> NetworkDtypes:
    """The dtype of every value and weight of an engine for a GPU."""
    table = config.model.weight_table()
    precise = {name for name, spec in table.items() if spec.full_precision}
    return network_dtypes(config.program(), precise, config.build.activations or "")


def quantizable(config: EngineConfig) -> list[str]:
    """The matrices that can be stored in few bits: of linear layers and experts, and not of full precision.

    What other operators read stays as it is, as tied embeddings.
    """
    table = config.model.weight_table()
    read_as: dict[str, set[tuple[str, str]]] = {}
    for node in config.program().nodes:
        for role, name in node.weights.items():
            read_as.setdefault(name, set()).add((node.op, role))
    return [name for name, roles in read_as.items() if roles <= PANEL_ROLES and not table[name].full_precision]


def quantizations_of(config: EngineConfig) -> dict[str, Quantization]:
    """How matrices are stored in few bits, but for those that a pattern excludes.

    Raises `ValueError` with patterns of all those whose rows do not hold a whole number of groups.
    """
    build = config.build
    if not build.changes_matrices:
        return {}
    how = Quantization(str(build.weights), build.group_size or 0)
    names = [name for name in quantizable(config) if not any(fnmatchcase(name, p) for p in build.exclude)]
    table = config.model.weight_table()
    uneven = {re.sub(r"\d+", "*", name) for name in names if not how.divides(table[name].shape)}
    if uneven:
        raise ValueError(
            f"groups of {how.group_size} do not divide the rows of {', '.join(sorted(uneven))}: "
            "choose another group_size or exclude them"
        )
    return dict.fromkeys(names, how)


def stored_weights(config: EngineConfig) -> dict[str, StoredWeight]:
    """How each weight of the program is stored."""
    dtypes, hows = dtypes_of(config), quantizations_of(config)
    return {
        name: StoredWeight(name, replace(spec, dtype=dtypes.weights[name]), hows.get(name))
        for name, spec in config.program().weights.items()
    }


def weight_bytes(config: EngineConfig) -> dict[str, int]:
    """Bytes of each weight as it is stored, with its scales."""
    return {name: sum(map(_bytes, weight.specs().values())) for name, weight in stored_weights(config).items()}


def _bytes(spec: TensorSpec) -> int:
    return -(-math.prod(int(dim) for dim in spec.shape) * _BITS[spec.dtype] // 8)


def stored_tensors(config: EngineConfig, read: Read) -> Iterator[tuple[str, TensorSpec, torch.Tensor]]:
    """Name, spec and numbers of all that stands for weights, one after another; two numbers of int4 share a byte."""
    for name, weight in stored_weights(config).items():
        tensors = weight.tensors(read(name))
        for part, spec in weight.specs().items():
            yield part, spec, tensors[part]
