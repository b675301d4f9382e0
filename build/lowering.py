"""The program as the C++ executor runs it: nodes fused, values as windows of one arena, weights in packed formats.

Splits and flattenings are windows and cost nothing; projections of one input are one projection; operators that may
write over their input do. What remains is one list, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridtrt.plugins.linear.panel_layout import PANEL_ROLES
from hybridtrt.plugins.program import Node, Program
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import OpSpec

ALIGNMENT = 16  # numbers: every buffer begins at a whole cache line
SPLITS, FLATTENS = "split", "flatten"


@dataclass(frozen=True)
class StoredAs:
    """A packed format (`plugins.native.library.FORMATS`) and the numbers that share a scale in it, 0: a whole row."""

    format: str
    group: int = 0


@dataclass(frozen=True)
class PackedWeight:
    """`parts` (names of weights), of so many `rows` each, one below the other; `shape` is that of all together."""

    parts: tuple[str, ...]
    stored: StoredAs
    rows: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """What it is called in an engine file: its format and parts."""
        group = f"_g{self.stored.group}" if self.stored.group else ""
        return f"{self.stored.format}{group}:{'+'.join(self.parts)}"


@dataclass(frozen=True)
class Window:
    """A value as columns of a buffer, from `column` on; `dims` are a row's dimensions."""

    buffer: str
    column: int
    dims: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.dims)


@dataclass
class Buffer:
    """`width` numbers a row; `rows` as `TensorSpec.rows`. `offset`: where it lies in the arena, in numbers a row."""

    rows: str
    width: int
    offset: int = -1

    @property
    def row_stride(self) -> int:
        return -(-self.width // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class LoweredNode:
    """One call of a kernel; operands in the order of the operator's spec, None where an optional weight is absent.

    Attributes are numbers: NaN for None, the index among the spec's choices for a name, the index of the page group.
    An attribute that is a list follows the weights as a constant, a tuple of numbers.
    """

    op: str
    name: str
    inputs: tuple[Window, ...]
    outputs: tuple[Window, ...]
    weights: tuple[PackedWeight | tuple[float, ...] | None, ...]
    caches: tuple[str, ...]
    attributes: tuple[float, ...]


@dataclass
class LoweredProgram:
    """Nodes in order. `windows` has the values that can still be read after a step: the kept ones."""

    nodes: list[LoweredNode] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    groups: tuple[str, ...] = ()  # page groups in the order of the block tables
    output: str = ""  # the buffer of the logits, outside the arena
    token_width: int = 0  # numbers of the arena a token
    logits_width: int = 0  # and a row of logits
    step_width: int = 0  # and a step

    def packed_weights(self) -> dict[str, PackedWeight]:
        """All weights by name."""
        found = (weight for node in self.nodes for weight in node.weights)
        return {weight.name: weight for weight in found if isinstance(weight, PackedWeight)}


Choose = Callable[[str], StoredAs]  # the panel format of a matrix, by its name


def lower(program: Program, choose: Choose, keep: Collection[str] = ()) -> LoweredProgram:
    """Fuse a program and lay out its arena.

    `choose` names the format of each matrix that has panels. Values in `keep` stay readable after a step.
    """
    groups = sorted({spec.group for spec in program.caches.values() if hasattr(spec, "group")})
    lowered = LoweredProgram(groups=tuple(groups))
    nodes, windows = _windows(program, _merge_linears(program, choose), keep, lowered.buffers)
    for node in nodes:
        spec = op_spec(node.op)
        numbers, constants = _attributes(spec, node.attributes, lowered.groups)
        weights = [
            None if role not in node.weights else _packed(program, choose, node, role)
            for role in (*spec.weights, *spec.optional_weights)
        ]
        lowered.nodes.append(
            LoweredNode(
                op=node.op,
                name=node.name,
                inputs=tuple(windows[name] for name in node.inputs),
                outputs=tuple(windows[name] for name in node.outputs),
                weights=(*weights, *constants),
                caches=tuple(node.caches[role] for role in spec.caches),
                attributes=numbers,
            )
        )
    (output,) = program.outputs
    lowered.output = windows[output].buffer
    lowered.windows = {name: windows[name] for name in keep if name != output}
    kept = {window.buffer for window in lowered.windows.values()}
    lowered.token_width = _lay_out(lowered, "T", kept)
    lowered.logits_width = _lay_out(lowered, "R", kept)
    lowered.step_width = _lay_out(lowered, "1", kept)
    return lowered


@dataclass(frozen=True)
class _Merged(Node):
    """Linear nodes of one input as one. `parts` are the weights by role, one for each output."""

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _merge_linears(program: Program, choose: Choose) -> list[Node]:
    """The nodes, with linear ones of the same input, format and bias together where the first of them was."""
    uses = Counter(weight for node in program.nodes for weight in node.weights.values())
    alike: dict[tuple[Any, ...], list[Node]] = {}
    for node in program.nodes:
        if node.op == "linear" and uses[node.weights["weight"]] == 1:  # what is shared is stored once, by itself
            alike.setdefault((node.inputs, "bias" in node.weights, choose(node.weights["weight"])), []).append(node)
    merged: dict[str, Node | None] = {}
    for together in alike.values():
        merged |= {node.name: None for node in together}
        first = together[0]
        merged[first.name] = _Merged(
            op="linear",
            name=first.name,
            inputs=first.inputs,
            outputs=tuple(output for node in together for output in node.outputs),
            weights=first.weights,
            parts={role: tuple(node.weights[role] for node in together) for role in first.weights},
        )
    found = (merged.get(node.name, node) for node in program.nodes)
    return [node for node in found if node is not None]


def _windows(
    program: Program, nodes: Sequence[Node], keep: Collection[str], buffers: dict[str, Buffer]
) -> tuple[list[Node], dict[str, Window]]:
    """The nodes that compute something, and where each value lies."""
    last = {name: i for i, node in enumerate(nodes) for name in (*node.outputs, *node.inputs)}
    windows = {name: Window(name, 0, ()) for name in program.inputs}
    held: dict[str, set[str]] = {}  # the values of a buffer
    computing: list[Node] = []

    def dims(name: str) -> tuple[int, ...]:
        return program.values[name].row_shape

    def place(name: str, window: Window) -> None:
        windows[name] = window
        held.setdefault(window.buffer, set()).add(name)

    for i, node in enumerate(nodes):
        if node.op in (SPLITS, FLATTENS):
            source = windows[node.inputs[0]]
            column = source.column
            for output in node.outputs:
                place(output, Window(source.buffer, column, dims(output)))
                column += windows[output].width
            continue
        computing.append(node)
        free = _overwritten(node, windows, buffers)
        if free is not None:
            values = held[free]
            if all(last[value] <= i for value in values) and not values & {*keep, *program.outputs}:
                place(node.outputs[0], Window(free, 0, dims(node.outputs[0])))
                continue
        if isinstance(node, _Merged):
            rows = program.values[node.outputs[0]].rows
            buffers[node.name] = Buffer(rows, sum(math.prod(dims(output)) for output in node.outputs))
            column = 0
            for output in node.outputs:
                place(output, Window(node.name, column, dims(output)))
                column += windows[output].width
        else:
            for output in node.outputs:
                buffers[output] = Buffer(program.values[output].rows, math.prod(dims(output)))
                place(output, Window(output, 0, dims(output)))
    return computing, windows


def _overwritten(node: Node, windows: Mapping[str, Window], buffers: Mapping[str, Buffer]) -> str | None:
    """The buffer that the node may write over, if nobody needs it afterwards."""
    for output, source in op_spec(node.op).aliases:
        window = windows[node.inputs[source]]
        buffer = buffers.get(window.buffer)
        others = {windows[name].buffer for i, name in enumerate(node.inputs) if i != source}
        if output == 0 and buffer is not None and window.width == buffer.width and window.buffer not in others:
            return window.buffer
    return None


def _packed(program: Program, choose: Choose, node: Node, role: str) -> PackedWeight:
    parts = node.parts[role] if isinstance(node, _Merged) else (node.weights[role],)
    stored, rows = stored_as(program, choose, node, role), tuple(int(program.weights[part].shape[0]) for part in parts)
    return PackedWeight(parts, stored, rows, (sum(rows), *(int(dim) for dim in program.weights[parts[0]].shape[1:])))


def stored_as(program: Program, choose: Choose, node: Node, role: str) -> StoredAs:
    """The format that a node reads one of its weights in."""
    name = node.weights[role]
    if (node.op, role) in PANEL_ROLES:
        return choose(name)
    if node.op == "embedding":
        dtype = program.weights[name].dtype
        tied = any(other.op == "linear" and name in other.weights.values() for other in program.nodes)
        panel = choose(name)
        return panel if tied and panel.format.removesuffix("_rounded") == f"panel_{dtype}" else StoredAs(dtype)
    return StoredAs("float32")


def _attributes(
    spec: OpSpec, attributes: Mapping[str, Any], groups: Sequence[str]
) -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
    """Attributes as numbers, and those that are lists as constants."""
    numbers, constants = [], []
    for name in spec.attributes:
        value = attributes.get(name)
        if isinstance(value, (list, tuple)):
            constants.append(tuple(float(item) for item in value))
            value = None
        elif name == "group":
            value = groups.index(value)
        elif isinstance(value, str):
            value = spec.choices[name].index(value)
        numbers.append(math.nan if value is None else float(value))
    return tuple(numbers), constants


def _lay_out(lowered: LoweredProgram, rows: str, kept: Collection[str]) -> int:
    """Give the buffers of one kind of rows their places, low ones first; returns the width of them all."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, node in enumerate(lowered.nodes):
        for window in (*node.inputs, *node.outputs):
            buffer = lowered.buffers.get(window.buffer)
            if buffer is not None and buffer.rows == rows and window.buffer != lowered.output:
                first.setdefault(window.buffer, i)
                last[window.buffer] = len(lowered.nodes) if window.buffer in kept else i
    placed: list[tuple[int, int, int]] = []  # begin, end, last node
    total = 0
    for name in sorted(first, key=first.__getitem__):
        placed = [place for place in placed if place[2] >= first[name]]
        buffer, begin = lowered.buffers[name], 0
        for other_begin, other_end, _ in sorted(placed):
            if begin + buffer.row_stride <= other_begin:
                break
            begin = max(begin, other_end)
        buffer.offset = begin
        placed.append((begin, begin + buffer.row_stride, last[name]))
        total = max(total, begin + buffer.row_stride)
    return total
