"""A named place in the program: operator calls whose nodes, weights and caches share a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridtrt.plugins.program import Program


@dataclass(frozen=True)
class Scope:
    """Thin front of a `Program`. Operands are values (names in the program); weights are named relative to `prefix`."""

    program: Program
    prefix: str
    norm_eps: float

    def path(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def inner(self, name: str) -> Scope:
        """The scope below this one."""
        return Scope(self.program, self.path(name), self.norm_eps)

    def call(self, op: str, name: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """An operator without weights and caches."""
        return self.program.call(op, self.path(name), *inputs, **attributes)

    def linear(self, x: str, name: str) -> str:
        """Dense projection `{name}.weight`, with `{name}.bias` where the model has one."""
        weights = {"weight": self.path(f"{name}.weight")}
        bias = self.path(f"{name}.bias")
        if bias in self.program.weights:
            weights["bias"] = bias
        return self.program.call("linear", self.path(name), x, weights=weights)[0]

    def norm(self, x: str, name: str, gate: str | None = None, gate_first: bool = False) -> str:
        """RMSNorm `{name}.weight` over the last dimension, with an optional SiLU gate."""
        operands = (x,) if gate is None else (x, gate)
        weights = {"weight": self.path(f"{name}.weight")}
        return self.program.call(
            "rms_norm", self.path(name), *operands, weights=weights, eps=self.norm_eps, gate_first=gate_first
        )[0]

    def conv(self, x: str) -> str:
        """Causal convolution `conv.*` with SiLU over the state pool `conv_state`."""
        weights = {"weight": self.path("conv.weight")}
        if self.path("conv.bias") in self.program.weights:
            weights["bias"] = self.path("conv.bias")
        caches = {"state": self.path("conv_state")}
        return self.program.call(
            "causal_conv", self.path("conv"), x, weights=weights, caches=caches, activation="silu"
        )[0]

    def split(self, x: str, name: str, *shapes: tuple[int, ...]) -> tuple[str, ...]:
        """Cut the last dimension into parts of the given shapes."""
        return self.call("split", name, x, shapes=[list(shape) for shape in shapes])
