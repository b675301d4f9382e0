"""Typed reading of a Hugging Face `config.json`. Errors name the key, its value, what was expected and the file."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LAYERS = 4096
MAX_EXPERTS = 65536

# Keys that a vision-language model may hold outside of `text_config`.
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
TIE_KEY = "tie_word_embeddings"

# Version 4 of transformers and hub files say `mamba` and `attention`.
LAYER_TYPE_ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True)
class HFConfig:
    """The values of a `config.json` and where they came from.

    A key that is absent takes the default, which is the default of the transformers class; without one the key is
    required. A key that is null is an error unless the class gives null a meaning (`nullable`: it means the default).
    """

    values: Mapping[str, Any]
    source: str = "config.json"

    @classmethod
    def load(cls, path: Path) -> HFConfig:
        """Read a JSON object. Raises `ValueError` if the file is missing, is no JSON or no object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: is not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path}: holds a JSON {type(values).__name__}, expected an object")
        return cls(values, str(path))

    def error(self, name: str, expected: str) -> ValueError:
        """The error for a key whose value is not what was expected."""
        value = json.dumps(self.values[name], default=str) if name in self.values else "absent"
        shown = value if len(value) <= 200 else value[:200] + "…"
        return ValueError(f"{name}={shown}: expected {expected} ({self.source})")

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = 2**31 - 1,
        nullable: bool = False,
    ) -> int:
        """An integer in minimum..maximum."""
        value = self._value(name, default, nullable)
        expected = f"an integer in {minimum}..{maximum}"
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(name, expected)
        return value

    def spelled(self, *names: str) -> str:
        """The spelling of a key that the file uses; the first one if it uses none."""
        return next((name for name in names if name in self.values), names[0])

    def head_dim(self, hidden_size: int, num_heads: int, *, nullable: bool = False) -> int:
        """`head_dim`; where it is absent the hidden size by the number of heads."""
        if self.values.get("head_dim") is None and hidden_size < num_heads:
            raise self.error("num_attention_heads", f"at most hidden_size={hidden_size}, as head_dim is absent")
        return self.integer("head_dim", hidden_size // num_heads, nullable=nullable)

    def number(self, name: str, default: float | None = None, *, positive: bool = False) -> float:
        """A finite number."""
        value = _number(self._value(name, default))
        if value is None or not math.isfinite(value) or (positive and value <= 0):
            raise self.error(name, "a finite number" + (" > 0" if positive else ""))
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, default: str | None, allowed: Collection[str], *, nullable: bool = False) -> str:
        """One of the allowed strings."""
        value = self._value(name, default, nullable)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, " or ".join(sorted(allowed)))
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; absent and null mean an empty one."""
        value = self._value(name, (), nullable=True)
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise self.error(name, "a list of integers")
        return tuple(value)

    def numbers(self, name: str, count: int, *, zeros: bool = False) -> tuple[float, ...]:
        """A list of `count` finite numbers > 0, with `zeros` also 0."""
        value = self._value(name, None)
        items = [_number(item) for item in value] if isinstance(value, (list, tuple)) else []
        valid = [item for item in items if item is not None and math.isfinite(item)]
        numbers = tuple(item for item in valid if item > 0 or (zeros and item == 0))
        if len(items) != count or len(numbers) != count:
            raise self.error(name, f"a list of {count} finite numbers {'>=' if zeros else '>'} 0")
        return numbers

    def interval(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers, low then high; infinity may be spelled `Infinity` or `{"__float__": "Infinity"}`."""
        value = self._value(name, default)
        bounds = [_number(item) for item in value] if isinstance(value, (list, tuple)) else []
        if len(bounds) != 2 or None in bounds or not bounds[0] <= bounds[1]:  # type: ignore[operator]
            raise self.error(name, "two numbers, low then high")
        return bounds[0], bounds[1]  # type: ignore[return-value]

    def token_ids(self, name: str, default: int | None = None, *, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them, each below the vocabulary size; null means none."""
        value = self._value(name, () if default is None else default, nullable=True)
        if name in self.values and self.values[name] is None:
            return ()
        ids = value if isinstance(value, (list, tuple)) else [value]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
            raise self.error(name, f"token ids in 0..{vocab_size - 1} (vocab_size={vocab_size})")
        return tuple(ids)

    def token_id(self, name: str, default: int | None = None, *, vocab_size: int) -> int | None:
        """A token id below the vocabulary size; null means none, and so does a `pad_token_id` of -1."""
        value = self.values.get(name)
        if name == "pad_token_id" and type(value) is int and value == -1:
            return None
        ids = self.token_ids(name, default, vocab_size=vocab_size)
        if len(ids) > 1 or isinstance(self.values.get(name), list):
            raise self.error(name, "one token id")
        return ids[0] if ids else None

    def text(self, *wrappers: str) -> HFConfig:
        """The text part of a vision-language model, `text_config`; the whole where there is no such key.

        In a `model_type` that is one of `wrappers`, a part that is absent is all defaults.
        What the wrapper says of tied embeddings holds, and of special tokens if the text part says nothing.
        """
        there = "text_config" in self.values
        if not there and self.values.get("model_type") not in wrappers:
            return self
        section = self.section("text_config")
        if there and not section.values:
            raise self.error("text_config", "an object that is not empty")
        outer = {key: self.values[key] for key in (*TOKEN_KEYS, TIE_KEY) if self.values.get(key) is not None}
        inner = {key: value for key, value in section.values.items() if key not in outer or value is not None}
        tie = {key: value for key, value in outer.items() if key == TIE_KEY}
        return HFConfig(outer | inner | tie, section.source)

    def section(self, *names: str) -> HFConfig:
        """The first of the named objects that is present, not null and not empty; an empty one if there is none."""
        for name in names:
            value = self.values.get(name)
            if value is not None and not isinstance(value, dict):
                raise self.error(name, "an object or null")
            if value:
                return HFConfig(value, f"{self.source}, {name}")
        return HFConfig({}, self.source)

    def layer_pattern(self, *names: str, allowed: Collection[str]) -> tuple[str, ...] | None:
        """The mixer of each layer in the spelling of transformers 5; None if absent or null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
                raise self.error(name, "a list of layer types")
            pattern: tuple[str, ...] = tuple(LAYER_TYPE_ALIASES.get(str(item), str(item)) for item in value)
            unknown = [item for item in pattern if item not in allowed]
            if unknown:
                raise ValueError(
                    f"{name} has the layer type {unknown[0]!r}: expected {', '.join(sorted(allowed))} ({self.source})"
                )
            return pattern
        return None

    def layer_count(self, default: int, pattern: tuple[str, ...] | None) -> int:
        """`num_hidden_layers`; where it is absent the length of the pattern, if there is one."""
        count = self.integer("num_hidden_layers", len(pattern) if pattern else default, maximum=MAX_LAYERS)
        if pattern and len(pattern) != count:
            raise self.error("num_hidden_layers", f"{len(pattern)}, the number of entries of the layer pattern")
        return count

    def _value(self, name: str, default: Any, nullable: bool = False) -> Any:
        value = self.values.get(name)
        if name not in self.values or (nullable and value is None):
            if default is None:
                raise self.error(name, "a value")
            return default
        return value


def _number(value: Any) -> float | None:
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value["__float__"]))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number
