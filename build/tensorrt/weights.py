"""A network's weights: constants that point to the checkpoint's memory, or inputs of the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hybridtrt.build.tensorrt.dtypes import NetworkDtypes
from hybridtrt.build.tensorrt.layers import Layers, Tensor
from hybridtrt.build.tensorrt.quantization import Quantization, quantized, quantized_specs, scale_name
from hybridtrt.build.tensorrt.trt_dtypes import trt_dtype
from hybridtrt.plugins.spec import TensorSpec

Read = Callable[[str], torch.Tensor]


class Weights:
    """Tensors of weights by name, each made when it is first asked for and named like the weight.

    `read` gives a weight as the checkpoint has it; without it weights become inputs of the network. `quantizations`
    says which matrices are stored in few bits. `inputs` collects the specs of what became an input.
    """

    def __init__(
        self,
        layers: Layers,
        specs: Mapping[str, TensorSpec],
        dtypes: NetworkDtypes,
        quantizations: Mapping[str, Quantization],
        read: Read | None,
    ) -> None:
        self._layers, self._specs, self._dtypes = layers, specs, dtypes
        self._quantizations, self._read = quantizations, read
        self._tensors: dict[str, Tensor] = {}
        self.inputs: dict[str, TensorSpec] = {}

    def plain(self, name: str) -> Tensor:
        """A weight that is not quantised, in its dtype."""
        if name in self._tensors:
            return self._tensors[name]
        spec = TensorSpec(self._specs[name].shape, self._dtypes.weights[name])
        value = None if self._read is None else self._read(name).to(getattr(torch, spec.dtype)).contiguous()
        self._tensors[name] = self._stored(name, spec, value)
        return self._tensors[name]

    def matrix(self, name: str) -> Tensor:
        """A weight in the dtype that it is multiplied in: quantised ones go through a layer that dequantises them."""
        if name not in self._quantizations:
            return self.plain(name)
        if name in self._tensors:
            return self._tensors[name]
        how, dtype = self._quantizations[name], self._dtypes.weights[name]
        specs = quantized_specs(name, self._specs[name].shape, how, dtype)
        values = {} if self._read is None else quantized(name, self._read(name), how, dtype)
        numbers, scales = (self._stored(part, specs[part], values.get(part)) for part in (name, scale_name(name)))
        trt = self._layers.trt
        layer = self._layers.network.add_dequantize(numbers, scales, trt_dtype(trt, dtype))
        if how.per_output:
            layer.axis = 0
        layer.name = f"{name}/dequantize"
        self._tensors[name] = layer.get_output(0)
        return self._tensors[name]

    def _stored(self, name: str, spec: TensorSpec, value: torch.Tensor | None) -> Tensor:
        trt, network = self._layers.trt, self._layers.network
        dtype = trt_dtype(trt, spec.dtype)
        if value is None:
            self.inputs[name] = spec
            return network.add_input(name, dtype, spec.shape)
        self._layers.keep(value)
        layer = network.add_constant(spec.shape, trt.Weights(dtype, value.data_ptr(), _count(spec)))
        layer.name = name
        layer.get_output(0).name = name
        return layer.get_output(0)


def _count(spec: TensorSpec) -> int:
    count = 1
    for dim in spec.shape:
        count *= int(dim)
    return count
