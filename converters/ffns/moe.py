"""Mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.ffns.mlp import MlpConfig
from hybridtrt.converters.ffns.router import RouterConfig, RouterMlpConfig
from hybridtrt.converters.weights import WeightTable, matrix, precise


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of MLP experts, with an optional shared expert that every token passes.

    `activation` "swiglu_oai" is (up + 1) * gate * sigmoid(1.702 gate). With `latent` the experts work on a projection
    of the tokens to that width, and their sum is projected back; router and shared expert see the tokens themselves.
    """

    num_experts: int
    top_k: int
    intermediate: int
    router: RouterConfig
    activation: str = "silu"
    gated: bool = True  # down(act(gate x) * up x), of routed and shared experts; else down(act(up x))
    expert_bias: bool = False  # of the routed experts' projections
    clamp: float | None = None  # of the routed experts: gate at most this, up within plus and minus this
    latent: int = 0  # 0: none
    shared_intermediate: int = 0  # 0: no shared expert
    shared_gate: bool = False  # the shared expert's output is scaled by sigmoid(w x)
    bias: bool = False  # of the shared expert's and the latent projections
    router_mlp: RouterMlpConfig | None = None  # in place of the router's projection
    skip: bool = False  # the router may also choose no expert, its last class

    kind: ClassVar[str] = "moe"

    def __post_init__(self) -> None:
        self.router.check(self.num_classes, self.top_k)
        if self.router.bias and self.router_mlp is not None:
            raise ValueError("router.bias=True is that of a projection: expected false with router_mlp")

    @property
    def num_classes(self) -> int:
        """What the router chooses from."""
        return self.num_experts + self.skip

    @property
    def shared(self) -> MlpConfig | None:
        """The shared expert."""
        if not self.shared_intermediate:
            return None
        return MlpConfig(self.shared_intermediate, self.activation, self.gated, self.bias)

    def weights(self, hidden: int) -> WeightTable:
        """`experts.gate_up` rows are gate, up; without a gate `experts.up` takes its place."""
        count, classes, width = self.num_experts, self.num_classes, self.latent or hidden
        up, rows = ("gate_up", 2 * self.intermediate) if self.gated else ("up", self.intermediate)
        if self.router_mlp is None:
            table = {"router.weight": precise(classes, hidden)}
        else:
            table = {f"router.{name}": spec for name, spec in self.router_mlp.weights(hidden, classes).items()}
        table[f"experts.{up}"] = matrix(count, rows, width)
        table["experts.down"] = matrix(count, width, self.intermediate)
        if self.router.bias:
            table["router.bias"] = precise(classes)
        if self.router.selection_bias:
            table["router.selection_bias"] = precise(classes)
        if self.expert_bias:
            table |= {f"experts.{up}_bias": precise(count, rows), "experts.down_bias": precise(count, width)}
        if self.latent:
            for name, shape in (("latent_down", (width, hidden)), ("latent_up", (hidden, width))):
                table[f"{name}.weight"] = matrix(*shape)
                if self.bias:
                    table[f"{name}.bias"] = precise(shape[0])
        if self.shared is not None:
            table |= {f"shared.{name}": spec for name, spec in self.shared.weights(hidden).items()}
            if self.shared_gate:
                table["shared_gate.weight"] = precise(1, hidden)
        return table
