"""A named place in the program: operator calls whose nodes, weights and caches share a prefix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hybridtrt.build.capacity import Capacity
from hybridtrt.plugins.program import Program


@dataclass(frozen=True)
class Scope:
    """Thin front of a `Program`. Operands are values (names in the program); weights are named relative to `prefix`.

    Where layers share weights, `weights_prefix` takes its place for weights; nodes, caches and low-rank adapters stay
    those of the layer. `capacity` is that of the experts, None: they take all.
    """

    program: Program
    prefix: str
    norm_eps: float
    weights_prefix: str | None = None
    capacity: Capacity | None = None

    def path(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def weight(self, name: str) -> str:
        """The name of a weight in the program."""
        return self.path(name) if self.weights_prefix is None else f"{self.weights_prefix}.{name}"

    def inner(self, name: str) -> Scope:
        """The scope below this one."""
        weights_prefix = None if self.weights_prefix is None else self.weight(name)
        return replace(self, prefix=self.path(name), weights_prefix=weights_prefix)

    def call(self, op: str, name: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """An operator without weights and caches."""
        return self.program.call(op, self.path(name), *inputs, **attributes)

    def linear(self, x: str, name: str) -> str:
        """Dense projection `{name}.weight`, with `{name}.bias` and the low-rank `{name}.adapter_*` if there are any."""
        weights = {"weight": self.weight(f"{name}.weight")}
        bias = self.weight(f"{name}.bias")
        if bias in self.program.weights:
            weights["bias"] = bias
        (y,) = self.program.call("linear", self.path(name), x, weights=weights)
        if self.path(f"{name}.adapter_up.weight") not in self.program.weights:
            return y
        own = replace(self, weights_prefix=None)
        adapted = own.linear(own.linear(x, f"{name}.adapter_down"), f"{name}.adapter_up")
        return self.call("add", f"{name}.adapted", y, adapted)[0]

    def norm(self, x: str, name: str, gate: str | None = None, eps: float | None = None, **gating: Any) -> str:
        """RMSNorm `{name}.weight` over the last dimension, with a bias a LayerNorm; `gating` says how a gate acts."""
        operands = (x,) if gate is None else (x, gate)
        weights = {"weight": self.weight(f"{name}.weight")}
        eps = self.norm_eps if eps is None else eps
        if self.weight(f"{name}.bias") in self.program.weights:
            weights["bias"] = self.weight(f"{name}.bias")
            return self.program.call("layer_norm", self.path(name), *operands, weights=weights, eps=eps)[0]
        return self.program.call("rms_norm", self.path(name), *operands, weights=weights, eps=eps, **gating)[0]

    def affine(self, x: str, name: str) -> str:
        """(x + `{name}.bias`) * `{name}.weight`, or without a bias where the model has none."""
        weights = {"weight": self.weight(f"{name}.weight")}
        if self.weight(f"{name}.bias") in self.program.weights:
            weights["bias"] = self.weight(f"{name}.bias")
        return self.program.call("affine", self.path(name), x, weights=weights)[0]

    def conv(self, x: str, activation: str | None = "silu", name: str = "conv") -> str:
        """Causal convolution `{name}.*` over the state pool `{name}_state`."""
        weights = {"weight": self.weight(f"{name}.weight")}
        if self.weight(f"{name}.bias") in self.program.weights:
            weights["bias"] = self.weight(f"{name}.bias")
        caches = {"state": self.path(f"{name}_state")}
        return self.program.call(
            "causal_conv", self.path(name), x, weights=weights, caches=caches, activation=activation
        )[0]

    def split(self, x: str, name: str, *shapes: tuple[int, ...]) -> tuple[str, ...]:
        """Cut the last dimension into parts of the given shapes."""
        return self.call("split", name, x, shapes=[list(shape) for shape in shapes])
