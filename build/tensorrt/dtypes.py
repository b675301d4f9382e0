"""Which dtype each value and weight of a program has in a TensorRT network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hybridtrt.plugins.program import Node, Program

ACTIVATIONS = ("float16", "bfloat16", "float32")
FLOAT32_OPS = ("rotary_table", "router", "capacity")  # whose results are float32, and int32 where they are integers
FIRST_INPUT_OPS = (  # whose results have the dtype of the first input
    *("add", "multiply", "scale", "affine", "mean_heads", "activation", "gated_activation"),
    *("split", "concat", "flatten", "gather_rows", "rms_norm", "layer_norm", "rotary"),
)


@dataclass(frozen=True)
class NetworkDtypes:
    """Dtypes by name: of values and of weights, which no value shares its name with.

    Activations and matrices have the dtype that was asked for. Float32 are rotary tables, what a matrix of full
    precision gives (router logits, the shared expert's gate) and what comes of it, everything the router does, the
    final logits and the weights that are stored in full precision whatever the dtype. Numbers of experts are int32.
    """

    activation: str
    values: Mapping[str, str]
    weights: Mapping[str, str]

    def of(self, name: str) -> str:
        """The dtype of a value or a weight."""
        return self.values[name] if name in self.values else self.weights[name]


def network_dtypes(program: Program, precise: Collection[str], activation: str) -> NetworkDtypes:
    """The dtypes of all values and weights. `precise` names the weights of full precision.

    Raises `ValueError` for another activation dtype and for a value with the name of a weight.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation dtype {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    both = program.values.keys() & program.weights.keys()
    if both:
        raise ValueError(f"a value and a weight have one name: {', '.join(sorted(both))}")
    weights = {name: "float32" if name in precise else activation for name in program.weights}
    values = dict.fromkeys(program.inputs, "int32")
    for node in program.nodes:
        for output in node.outputs:
            whole = "int" in program.values[output].dtype
            values[output] = "int32" if whole else _result(node, values, weights, activation)
    for output in program.outputs:
        values[output] = "float32"
    return NetworkDtypes(activation, values, weights)


def _result(node: Node, values: Mapping[str, str], weights: Mapping[str, str], activation: str) -> str:
    if node.op in FLOAT32_OPS:
        return "float32"
    if node.op == "linear":
        return weights[node.weights["weight"]]
    return values[node.inputs[0]] if node.op in FIRST_INPUT_OPS else activation
