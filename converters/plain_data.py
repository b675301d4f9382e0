"""Checks plain data (from JSON) against the annotations of a dataclass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def checked(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as arguments for `cls`. Raises `ValueError` for a field that is missing, unknown or of another type."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    if set(values) != set(names):
        wrong = sorted(set(values) ^ set(names))[0]
        raise ValueError(f"{cls.__name__}: {'unknown' if wrong in values else 'missing'} field {wrong}")
    for name in names:
        if not _matches(values[name], hints[name]):
            raise ValueError(f"{cls.__name__}: {name}={values[name]!r}, expected {hints[name]}")
    return dict(values)


def _matches(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_matches(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
