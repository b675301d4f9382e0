"""The families that can be converted. Each module of this folder holds one, as its `FAMILY`."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from hybridtrt.converters.family import Family


@cache
def families() -> dict[str, Family]:
    """Every supported `model_type` with its family, sorted by name."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        family: Family = import_module(f"{__name__}.{module.name}").FAMILY
        found |= dict.fromkeys(family.model_types, family)
    return dict(sorted(found.items()))


def family(model_type: Any) -> Family:
    """The family of a `model_type`. Raises `ValueError`, naming the supported ones, if there is none."""
    supported = families()
    if not isinstance(model_type, str) or model_type not in supported:
        raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(supported)}")
    return supported[model_type]
