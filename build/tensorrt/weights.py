"""A network's weights: constants that point to the checkpoint's memory, or inputs of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.quantization import Quantization, quantized, quantized_specs, scale_name
from hybridtrt.build.tensorrt.tensor import Tensor
from hybridtrt.build.tensorrt.trt_dtypes import trt_dtype
from hybridtrt.plugins.spec import TensorSpec

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """How a network stores a weight: as a tensor of a dtype, or quantised and multiplied in that dtype."""

    name: str
    spec: TensorSpec
    how: Quantization | None = None

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors that stand for it, by name. Raises `ValueError` for a shape that cannot be quantised so."""
        if self.how is None:
            return {self.name: self.spec}
        return quantized_specs(self.name, self.spec.shape, self.how, self.spec.dtype)

    def tensors(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of `specs` for a weight as the checkpoint has it; int4 is packed, two numbers a byte."""
        if self.how is None:
            return {self.name: weight.to(getattr(torch, self.spec.dtype)).contiguous()}
        return quantized(self.name, weight, self.how, self.spec.dtype)


class Weights:
    """Tensors of weights by name, each made when it is first asked for, once, and named like the weight.

    `read` gives a weight as the checkpoint has it; without it weights become inputs of the network, whose specs
    `inputs` collects.
    """

    def __init__(self, layers: Layers, stored: Mapping[str, StoredWeight], read: Read | None) -> None:
        self._layers, self._stored, self._read = layers, stored, read
        self._tensors: dict[str, Tensor] = {}
        self.inputs: dict[str, TensorSpec] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A weight in the dtype that it is computed with; a quantised one goes through a layer that dequantises it."""
        if name not in self._tensors:
            self._tensors[name] = self._add(self._stored[name])
        return self._tensors[name]

    def _add(self, weight: StoredWeight) -> Tensor:
        values = {} if self._read is None else weight.tensors(self._read(weight.name))
        parts = {name: self._part(name, spec, values.get(name)) for name, spec in weight.specs().items()}
        if weight.how is None:
            return parts[weight.name]
        dtype = trt_dtype(self._layers.trt, weight.spec.dtype)
        numbers, scales = parts[weight.name].handle, parts[scale_name(weight.name)].handle
        layer = self._layers.network.add_dequantize(numbers, scales, dtype)
        if weight.how.per_output:
            layer.axis = 0
        layer.name = f"{weight.name}/dequantize"
        return Tensor.of(layer.get_output(0), weight.spec)

    def _part(self, name: str, spec: TensorSpec, value: torch.Tensor | None) -> Tensor:
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
