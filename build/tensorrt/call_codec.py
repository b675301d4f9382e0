"""A call as text: what a plugin is serialised as, in an engine and in an ONNX node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridtrt.plugins.call import Call, Operand
from hybridtrt.plugins.spec import TensorSpec

NAMESPACE = "hybridtrt"
VERSION = "1"
FIELD = "call"  # of a plugin, an ONNX node


@dataclass(frozen=True)
class PluginCall:
    """A call as a plugin.

    It returns its caches as aliases of its operands, or only writes them. `scratch_bytes` is the memory that the
    largest step needs besides.
    """

    call: Call
    returns_caches: bool
    scratch_bytes: int

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Results, then the caches."""
        caches = tuple(operand.spec for operand in self.call.of("cache")) if self.returns_caches else ()
        return (*self.call.results, *caches)

    def alias(self, output: int) -> int:
        """The operand that an output is the memory of, or -1."""
        if output < len(self.call.results):
            return -1
        caches = [i for i, operand in enumerate(self.call.operands) if operand.source == "cache"]
        return caches[output - len(self.call.results)]

    def to_text(self) -> str:
        call = self.call
        return json.dumps(
            {
                "op": call.op,
                "name": call.name,
                "operands": [[one.name, one.source, one.bound_to, *_plain(one.spec)] for one in call.operands],
                "results": [_plain(spec) for spec in call.results],
                "attributes": dict(call.attributes),
                "returns_caches": self.returns_caches,
                "scratch_bytes": self.scratch_bytes,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> PluginCall:
        """The inverse of `to_text`. Raises `ValueError` for anything else."""
        try:
            data = json.loads(text)
            operands = tuple(
                Operand(name, source, _spec([shape, dtype]), bound_to)
                for name, source, bound_to, shape, dtype in data["operands"]
            )
            results = tuple(_spec(plain) for plain in data["results"])
            call = Call(data["op"], data["name"], operands, results, data["attributes"])
            return cls(call, data["returns_caches"], data["scratch_bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"a plugin's field {FIELD!r} is damaged: {error}") from None


def _plain(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), spec.dtype]


def _spec(plain: Sequence[Any]) -> TensorSpec:
    shape, dtype = plain
    return TensorSpec(tuple(shape), dtype)
