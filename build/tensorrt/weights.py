"""A network's weights: constants that point to the checkpoint's memory, or inputs of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.quantization import Quantization, quantized, quantized_specs, scale_name
from hybridtrt.build.tensorrt.quantized_experts import expert_specs, quantized_experts
from hybridtrt.build.tensorrt.tensor import Tensor
from hybridtrt.build.tensorrt.trt_dtypes import trt_dtype
from hybridtrt.plugins.call import Call, Operand
from hybridtrt.plugins.spec import TensorSpec

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """How a network stores a weight: as a tensor of a dtype, or quantised and multiplied in that dtype.

    Matrices of three dimensions are experts', which kernels of ours dequantise.
    """

    name: str
    spec: TensorSpec
    how: Quantization | None = None

    @property
    def of_experts(self) -> bool:
        return len(self.spec.shape) == 3

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors that stand for it, by name. Raises `ValueError` for a shape that cannot be quantised so."""
        if self.how is None:
            return {self.name: self.spec}
        if self.of_experts:
            return expert_specs(self.name, self.spec.shape, self.how)
        return quantized_specs(self.name, self.spec.shape, self.how, self.spec.dtype)

    def tensors(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of `specs` for a weight as the checkpoint has it; int4 is packed, two numbers a byte."""
        if self.how is None:
            return {self.name: weight.to(getattr(torch, self.spec.dtype)).contiguous()}
        if self.of_experts:
            return quantized_experts(self.name, weight, self.how)
        return quantized(self.name, weight, self.how, self.spec.dtype)


def on_stored(call: Call, stored: Mapping[str, StoredWeight]) -> Call:
    """A plugin's call on the tensors that stand for its weights, scales as `{role}_scale`."""
    operands: list[Operand] = []
    for operand in call.operands:
        if operand.source != "weight":
            operands.append(operand)
            continue
        for part, spec in stored[operand.bound_to].specs().items():
            role = operand.name if part == operand.bound_to else f"{operand.name}_scale"
            operands.append(Operand(role, "weight", spec, part))
    return replace(call, operands=tuple(operands))


class Weights:
    """Tensors of weights by name, each made when it is first asked for, once, and named like the weight.

    `read` gives a weight as the checkpoint has it; without it weights become inputs of the network, whose specs
    `inputs` collects.
    """

    def __init__(self, layers: Layers, stored: Mapping[str, StoredWeight], read: Read | None) -> None:
        self._layers, self._stored, self._read = layers, stored, read
        self._whole = {part: weight for weight in stored.values() for part in weight.specs()}
        self._tensors: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self.inputs: dict[str, TensorSpec] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A weight in the dtype that it is computed with; a quantised one goes through a layer that dequantises it."""
        if name not in self._tensors:
            self._tensors[name] = self._dequantized(self._stored[name])
        return self._tensors[name]

    def part(self, name: str) -> Tensor:
        """One of the tensors that stand for a weight, as it is stored."""
        if name not in self._parts:
            weight = self._whole[name]
            values = {} if self._read is None else weight.tensors(self._read(weight.name))
            self._parts |= {part: self._add(part, spec, values.get(part)) for part, spec in weight.specs().items()}
        return self._parts[name]

    def _dequantized(self, weight: StoredWeight) -> Tensor:
        numbers = self.part(weight.name)
        if weight.how is None:
            return numbers
        dtype = trt_dtype(self._layers.trt, weight.spec.dtype)
        scales = self.part(scale_name(weight.name))
        layer = self._layers.network.add_dequantize(numbers.handle, scales.handle, dtype)
        if weight.how.per_output:
            layer.axis = 0
        layer.name = f"{weight.name}/dequantize"
        return Tensor.of(layer.get_output(0), weight.spec)

    def _add(self, name: str, spec: TensorSpec, value: torch.Tensor | None) -> Tensor:
        trt, network = self._layers.trt, self._layers.network
        dtype, shape = trt_dtype(trt, spec.dtype), tuple(map(int, spec.shape))
        if value is None:
            self.inputs[name] = spec
            return Tensor.of(network.add_input(name, dtype, shape), spec)
        self._layers.keep(value)
        layer = network.add_constant(shape, trt.Weights(dtype, value.data_ptr(), math.prod(shape)))
        layer.name = name
        layer.get_output(0).name = name
        return Tensor.of(layer.get_output(0), spec)
