"""The flat program: a list of operator calls without control flow, written once and read by every walker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridtrt.plugins.caches import DTYPE_BYTES, CacheSpec, PageSpec
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import Load, TensorSpec


@dataclass(frozen=True)
class Node:
    """One operator call. `weights` and `caches` map the operator's operand names to names in the program."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """Operator calls in order, with the specs of every value, weight and cache they name."""

    values: dict[str, TensorSpec] = field(default_factory=dict)
    weights: dict[str, TensorSpec] = field(default_factory=dict)
    caches: dict[str, CacheSpec] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: tuple[str, ...] = ()  # values that come from the step batch
    outputs: tuple[str, ...] = ()

    def add_input(self, name: str, spec: TensorSpec) -> str:
        """Declare a value that the step batch brings."""
        self.values[name] = spec
        self.inputs += (name,)
        return name

    def call(
        self,
        op: str,
        name: str,
        *inputs: str,
        weights: Mapping[str, str] | None = None,
        caches: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> tuple[str, ...]:
        """Append one operator call and return the names of its outputs.

        Raises `ValueError`, naming the node, for an unknown operand, a name used twice or shapes that do not fit.
        """
        spec = op_spec(op)
        weights, caches = dict(weights or {}), dict(caches or {})
        required, optional = set(spec.weights), set(spec.optional_weights)
        arity = len(spec.inputs) <= len(inputs) <= len(spec.inputs) + len(spec.optional_inputs)
        if (
            not arity
            or not required <= set(weights) <= required | optional
            or set(caches) != set(spec.caches)
            or not set(attributes) <= set(spec.attributes)
        ):
            raise ValueError(
                f"{name}: op {op!r} takes inputs {spec.inputs} (+ {spec.optional_inputs}), weights {spec.weights} "
                f"(+ {spec.optional_weights}), caches {spec.caches}, attributes {spec.attributes}; "
                f"got {len(inputs)} inputs, {sorted(weights)}, {sorted(caches)}, {sorted(attributes)}"
            )
        unknown = (
            [value for value in inputs if value not in self.values]
            + [weight for weight in weights.values() if weight not in self.weights]
            + [cache for cache in caches.values() if cache not in self.caches]
        )
        if unknown:
            raise ValueError(f"{name} ({op}): no such operand: {', '.join(unknown)}")
        try:
            results = spec.infer(
                [self.values[value] for value in inputs],
                {role: self.weights[weight] for role, weight in weights.items()},
                attributes,
            )
        except ValueError as error:
            raise ValueError(f"{name} ({op}): {error}") from None
        outputs = (name,) if len(results) == 1 else tuple(f"{name}:{i}" for i in range(len(results)))
        for output, result in zip(outputs, results, strict=True):
            if output in self.values:
                raise ValueError(f"value {output!r} is defined twice")
            self.values[output] = result
        self.nodes.append(Node(op, name, inputs, outputs, weights, caches, attributes))
        return outputs

    def flops(self, node: Node, load: Load) -> int:
        """Floating point operations of one node in a step of the given size."""
        return op_spec(node.op).flops(
            [self.values[value] for value in node.inputs],
            {role: self.weights[weight] for role, weight in node.weights.items()},
            node.attributes,
            load,
        )

    def bytes_moved(self, node: Node, load: Load, stored: Callable[[Node, str], int] | None = None) -> int:
        """Bytes that one node reads and writes: operands, results, weights, and its share of the caches.

        Pages are counted once a key attended, states as one read and one write a sequence. `stored` gives the bytes of
        a node's weight by its role where they are not those of its dtype.
        """
        spec = op_spec(node.op)
        operands = [self.values[value] for value in (*node.inputs, *node.outputs)]
        moved = sum(load.size(operand.shape) * DTYPE_BYTES[operand.dtype] for operand in operands)
        weights = {role: self.weights[weight] for role, weight in node.weights.items()}
        inputs = [self.values[value] for value in node.inputs]
        rows = None if spec.rows_read is None else spec.rows_read(inputs, weights, node.attributes, load)
        for role, weight in weights.items():
            whole = load.size(weight.shape) * DTYPE_BYTES[weight.dtype] if stored is None else stored(node, role)
            moved += whole if rows is None else whole * rows // int(weight.shape[0])
        for name in node.caches.values():
            cache = self.caches[name]
            if isinstance(cache, PageSpec):
                moved += (load.attended + load.tokens) * cache.bytes_per_token
            else:
                moved += 2 * load.sequences * cache.bytes_per_slot
        return moved

    def dead_after(self) -> list[tuple[str, ...]]:
        """For each node the values that nothing reads after it; outputs of the program stay."""
        last = {value: i for i, node in enumerate(self.nodes) for value in (*node.outputs, *node.inputs)}
        dead: list[list[str]] = [[] for _ in self.nodes]
        for value, i in last.items():
            if value not in self.outputs:
                dead[i].append(value)
        return [tuple(values) for values in dead]
