"""A program as a TensorRT network: the walk over its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridtrt.build.tensorrt.backend import AddPlugin, Backend
from hybridtrt.build.tensorrt.bindings import LOGITS, Bindings, cache_bindings, step_bindings
from hybridtrt.build.tensorrt.call_codec import PluginCall
from hybridtrt.build.tensorrt.dtypes import NetworkDtypes
from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.native import NATIVE
from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.quantization import Quantization
from hybridtrt.build.tensorrt.tensor import Tensor
from hybridtrt.build.tensorrt.trt_dtypes import dtype_name, trt_dtype
from hybridtrt.build.tensorrt.weights import Read, StoredWeight, Weights, on_stored
from hybridtrt.plugins.call import Call, call_of
from hybridtrt.plugins.gpu.plan import PLUGINS
from hybridtrt.plugins.program import Node, Program
from hybridtrt.plugins.spec import TensorSpec


@dataclass(frozen=True)
class Lowering:
    """What a network is made of besides the program.

    `scratch_bytes` gives the memory that the kernels of a call need for the largest step. `quantizations` says which
    matrices are stored in few bits. Without `read` (a weight by its name, as the checkpoint has it)
    weights are inputs of the network. With `return_caches` the caches are outputs too, as aliases of the inputs;
    without, plugins write to their inputs and TensorRT does not know.
    """

    dtypes: NetworkDtypes
    page_size: int
    scratch_bytes: Callable[[Call], int]
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)
    read: Read | None = None
    return_caches: bool = True

    def stored_weights(self, program: Program) -> dict[str, StoredWeight]:
        """How each weight of the program is stored."""
        return {
            name: StoredWeight(name, TensorSpec(spec.shape, self.dtypes.weights[name]), self.quantizations.get(name))
            for name, spec in program.weights.items()
        }


@dataclass(frozen=True)
class BuiltNetwork:
    """A network and what it is called with. It must live until the engine is built: constants point into it."""

    network: Any
    bindings: Bindings
    layers: Layers


def build_network(backend: Backend, network: Any, program: Program, lowering: Lowering) -> BuiltNetwork:
    """Add a program to an empty, strongly typed network.

    Raises `ValueError`, naming the node, for an operator that TensorRT has no way to compute and for layers that
    TensorRT refuses or gives another shape or dtype than the program has.
    """
    walk = _Walk(backend, network, program, lowering)
    for node in program.nodes:
        walk.add(node)
    return walk.finish()


class _Walk:
    def __init__(self, backend: Backend, network: Any, program: Program, lowering: Lowering) -> None:
        self._trt, self._network, self._program, self._lowering = backend.trt, network, program, lowering
        self._layers = Layers(backend.trt, network)
        self._stored = lowering.stored_weights(program)
        self._plans = {node.name: self._plan(node) for node in program.nodes if node.op in PLUGINS}
        self._add_plugin: AddPlugin = backend.plugin_layers(network, tuple(self._plans.values()))
        self._weights = Weights(self._layers, self._stored, lowering.read)
        self._step_specs = step_bindings(program)
        self._cache_specs = cache_bindings(program, lowering.page_size)
        self._step = {name: self._input(name, spec) for name, spec in self._step_specs.items()}
        self._caches = {name: self._input(name, spec) for name, spec in self._cache_specs.items()}
        self._values = {name: self._step[name] for name in program.inputs}
        self._cache_outputs: dict[str, str] = {}
        self._layers.rows_of("T", self._step["input_ids"])
        self._layers.rows_of("R", self._step["logits_indices"])

    def add(self, node: Node) -> None:
        """The layers of one node."""
        try:
            if node.op in NATIVE:
                results = self._native(node)
            elif node.name in self._plans:
                results = self._plugin(node)
            else:
                raise ValueError("TensorRT has neither layers nor a plugin for it")
            for output, tensor in zip(node.outputs, results, strict=True):
                self._expect(tensor, self._spec(output))
                self._values[output] = tensor
        except ValueError as error:
            raise ValueError(f"{node.name} ({node.op}): {error}") from None

    def finish(self) -> BuiltNetwork:
        """Mark the outputs."""
        (output,) = self._program.outputs
        logits = self._values[output]
        logits.handle.name = LOGITS
        self._network.mark_output(logits.handle)
        self._ask_tensorrt()
        spec = self._spec(output)
        bindings = Bindings(self._step_specs, self._cache_specs, spec, self._cache_outputs, self._weights.inputs)
        return BuiltNetwork(self._network, bindings, self._layers)

    def _plan(self, node: Node) -> PluginCall:
        call = call_of(self._program, node, self._lowering.page_size, self._lowering.dtypes.of)
        call = on_stored(call, self._stored)
        return PluginCall(call, self._lowering.return_caches, self._lowering.scratch_bytes(call))

    def _input(self, name: str, spec: TensorSpec) -> Tensor:
        """A dimension with a symbol is one size wherever the symbol occurs."""
        dims = tuple(-1 if isinstance(dim, str) else dim for dim in spec.shape)
        tensor = self._network.add_input(name, trt_dtype(self._trt, spec.dtype), dims)
        if tensor is None:
            raise ValueError(f"TensorRT refuses the input {name} {spec.shape} {spec.dtype}")
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                tensor.set_dimension_name(axis, dim)
        return Tensor.of(tensor, spec)

    def _native(self, node: Node) -> list[Tensor]:
        results = tuple(self._spec(output) for output in node.outputs)
        operands = Operands(
            layers=self._layers,
            inputs=tuple(self._values[name] for name in node.inputs),
            roles=frozenset(node.weights),
            weight=lambda role: self._weights[node.weights[role]],
            step=self._step,
            attributes=node.attributes,
            results=results,
        )
        made = NATIVE[node.op](operands)
        tensors = [self._layers.cast(tensor, spec.dtype) for tensor, spec in zip(made, results, strict=True)]
        self._layers.end_node(node.name)
        return tensors

    def _plugin(self, node: Node) -> list[Tensor]:
        planned = self._plans[node.name]
        sources = {"input": self._values.__getitem__, "weight": self._weights.part}
        sources |= {"cache": self._caches.__getitem__, "step": self._step.__getitem__}
        tensors = [sources[operand.source](operand.bound_to) for operand in planned.call.operands]
        for tensor, operand in zip(tensors, planned.call.operands, strict=True):
            self._expect(tensor, operand.spec)
        layer = self._add_plugin(planned, [tensor.handle for tensor in tensors])
        layer.name = node.name
        for i, operand in enumerate(planned.call.of("cache") if planned.returns_caches else ()):
            written = layer.get_output(len(planned.call.results) + i)
            written.name = self._cache_outputs[operand.bound_to] = f"{operand.bound_to}.out"
            self._network.mark_output(written)
        return [Tensor.of(layer.get_output(i), spec) for i, spec in enumerate(planned.call.results)]

    def _spec(self, value: str) -> TensorSpec:
        return TensorSpec(self._program.values[value].shape, self._lowering.dtypes.of(value))

    def _expect(self, tensor: Tensor, spec: TensorSpec) -> None:
        if tensor != Tensor.of(tensor.handle, spec):
            raise ValueError(f"a tensor is {tensor.dtype} {tensor.shape}, expected {spec.dtype} {spec.shape}")

    def _ask_tensorrt(self) -> None:
        """Raise `ValueError` where TensorRT gives a value another shape or dtype than the program."""
        for name, tensor in self._values.items():
            shape, dtype = tuple(tensor.handle.shape), dtype_name(self._trt, tensor.handle.dtype)
            if dtype != tensor.dtype or shape != tensor.shape:
                raise ValueError(f"TensorRT takes {name} for {dtype} {shape}, expected {tensor.dtype} {tensor.shape}")
