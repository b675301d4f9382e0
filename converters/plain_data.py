"""Frozen dataclasses to plain data (for JSON) and back, every field checked against its annotation.

A class with a `kind` writes it out, so that a union of such classes can be read back.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The annotated type of each field of a dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def to_plain(value: Any) -> Any:
    """Dataclasses become dicts, tuples lists; everything else stays as it is."""
    if is_dataclass(value):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(hint: Any, value: Any, name: str) -> Any:
    """The inverse of `to_plain` for a value of the annotated type.

    Raises `ValueError`, naming the field, for one that is missing, unknown or of another type.
    """
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _from_union(options, value, name)
    if is_dataclass(hint):
        return _from_union((hint,), value, name) if hasattr(hint, "kind") else _from_dict(hint, value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(from_plain(options[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is Literal and isinstance(value, str) and value in options:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and number and math.isfinite(value):
        return float(value)
    if (hint in (str, bool) and type(value) is hint) or (hint is int and type(value) is int):
        return value
    raise ValueError(f"{name}={value!r}: expected {getattr(hint, '__name__', hint)}")


def _from_union(options: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in options:
        return None
    classes = {option.kind: option for option in options if hasattr(option, "kind")}
    if not classes:
        (option,) = (option for option in options if option is not type(None))
        return from_plain(option, value, name)
    kind = value.get("kind") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(f"{name} has kind {kind!r}: expected one of {', '.join(classes)}")
    return _from_dict(classes[kind], {key: item for key, item in value.items() if key != "kind"}, name)


def _from_dict(cls: Any, value: Any, name: str) -> Any:
    hints = field_types(cls)
    if not isinstance(value, dict) or set(value) != set(hints):
        wrong = sorted(set(value) ^ set(hints), key=str)[0] if isinstance(value, dict) else value
        raise ValueError(f"{name}: missing or unknown field {wrong!r} of {cls.__name__}")
    return cls(**{field: from_plain(hint, value[field], f"{name}.{field}") for field, hint in hints.items()})
