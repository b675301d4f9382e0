"""Computes a TensorRT network on the CPU, layer by layer, in float64: the second reader of what the lowering wrote.

Plugins are computed by their definitions, found by the plugin's name and serialised fields; all that they read comes
through the tensors that the layer is connected to. Casts between floating point types change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrt.build.tensorrt.call_codec import FIELD, PluginCall
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import kernel
from hybridtrt.plugins.step import StepBatch

_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {"COS": torch.cos, "SIN": torch.sin, "SQRT": torch.sqrt}
_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "RELU": F.relu,
    "GELU_ERF": F.gelu,
    "GELU_TANH": lambda x: F.gelu(x, approximate="tanh"),
}
_FLOATS = ("FLOAT", "HALF", "BF16")


class NetworkEvaluator:
    """The layers of a network in an order in which they can be computed.

    Raises `AssertionError` for a layer of a kind, or with a setting, that it does not know.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self._layers: list[tuple[list[str], list[str], Callable[..., Any]]] = []
        self.outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        ready = {network.get_input(i).name for i in range(network.num_inputs)}
        waiting = [network.get_layer(i) for i in range(network.num_layers)]
        while waiting:
            later = []
            for layer in waiting:
                given = [layer.get_input(i) for i in range(layer.num_inputs)]
                inputs = [tensor.name for tensor in given if tensor is not None]
                if not ready.issuperset(inputs):
                    later.append(layer)
                    continue
                results = [layer.get_output(i).name for i in range(layer.num_outputs)]
                ready.update(results)
                self._layers.append((inputs, results, _function(trt, layer)))
            assert len(later) < len(waiting), f"layers wait for one another: {[layer.name for layer in later][:5]}"
            waiting = later

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name; caches among the inputs are overwritten."""
        values = dict(inputs)
        for names, results, function in self._layers:
            made = function(*(values[name] for name in names))
            values.update(zip(results, made if isinstance(made, tuple) else (made,), strict=True))
        return {name: values[name] for name in self.outputs}


def _function(trt: Any, layer: Any) -> Callable[..., Any]:
    """What a layer computes."""
    kind, function = _KINDS[layer.type.name]
    layer.__class__ = getattr(trt, kind)  # the network gives the base class
    return function(layer)


def _constant(layer: Any) -> Callable[..., Any]:
    value = layer.weights
    if not isinstance(value, np.ndarray):  # of a type that numpy lacks
        return lambda: None
    tensor = torch.from_numpy(np.array(value)).reshape(tuple(layer.shape))
    tensor = tensor.double() if tensor.is_floating_point() else tensor
    return lambda: tensor


def _cast(layer: Any) -> Callable[..., Any]:
    assert layer.to_type.name in _FLOATS, layer.to_type
    return lambda x: x.double()


def _shuffle(layer: Any) -> Callable[..., Any]:
    assert layer.num_inputs == 1
    assert layer.zero_is_placeholder
    for order in (layer.first_transpose, layer.second_transpose):
        assert list(order) == sorted(order)
    dims = tuple(layer.reshape_dims)
    return lambda x: x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(dims)])


def _slice(layer: Any) -> Callable[..., Any]:
    start, stride = tuple(layer.start), tuple(layer.stride)
    assert [layer.get_input(i) is not None for i in range(layer.num_inputs)] == [True, False, True]
    assert layer.mode.name == "STRICT_BOUNDS"

    def run(x: Tensor, size: Tensor) -> Tensor:
        ends = [s + (int(n) - 1) * by for s, n, by in zip(start, size.tolist(), stride, strict=True)]
        assert all(end < dim for end, dim in zip(ends, x.shape, strict=True)), f"{layer.name}: {ends} of {x.shape}"
        return x[tuple(slice(s, end + 1, by) for s, end, by in zip(start, ends, stride, strict=True))]

    return run


def _concatenation(layer: Any) -> Callable[..., Any]:
    axis = layer.axis
    return lambda *parts: torch.cat(parts, axis)


def _shape(layer: Any) -> Callable[..., Any]:
    return lambda x: torch.tensor(x.shape)


def _gather(layer: Any) -> Callable[..., Any]:
    axis = layer.axis
    assert layer.mode.name == "DEFAULT"
    assert layer.num_elementwise_dims == 0
    return lambda x, indices: x.index_select(axis, indices.long())


def _matmul(layer: Any) -> Callable[..., Any]:
    flips = [_flip(layer.op0), _flip(layer.op1)]
    return lambda x, y: flips[0](x) @ flips[1](y)


def _flip(operation: Any) -> Callable[[Tensor], Tensor]:
    assert operation.name in ("NONE", "TRANSPOSE")
    return (lambda x: x.transpose(-1, -2)) if operation.name == "TRANSPOSE" else (lambda x: x)


def _elementwise(layer: Any) -> Callable[..., Any]:
    function = _ELEMENTWISE[layer.op.name]

    def run(x: Tensor, y: Tensor) -> Tensor:
        assert x.dim() == y.dim(), f"{layer.name}: {x.shape} and {y.shape}"
        return function(x, y)

    return run


def _reduce(layer: Any) -> Callable[..., Any]:
    assert layer.op.name == "AVG"
    axes, keep = [i for i in range(8) if layer.axes >> i & 1], layer.keep_dims
    return lambda x: x.mean(axes, keepdim=keep)


def _dequantize(layer: Any) -> Callable[..., Any]:
    axis = layer.axis

    def run(x: Tensor, scale: Tensor) -> Tensor:
        wide = x.double()
        if scale.dim() == 0:
            return wide * scale
        if scale.dim() == 1:
            return wide * scale.reshape([-1 if i == axis else 1 for i in range(wide.dim())])
        return wide * scale.repeat_interleave(wide.shape[1] // scale.shape[1], 1)

    return run


def _plugin(layer: Any) -> Callable[..., Any]:
    """By the definition of the operator that the plugin's fields describe."""
    (field,) = list(layer.plugin.get_fields_to_serialize())
    assert field.name == FIELD
    planned = PluginCall.from_text(np.asarray(field.data).tobytes().decode())
    call, function = planned.call, kernel(layer.plugin.plugin_name, "reference")
    assert layer.num_inputs == len(call.operands)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(call.operands, tensors, strict=True))
        by_source = {
            source: {one.name: tensor for one, tensor in given.items() if one.source == source}
            for source in ("input", "weight", "cache", "step")
        }
        step = Step(_batch(by_source["step"], call.attributes.get("group", "")))
        named = by_source["weight"] | by_source["cache"] | dict(call.attributes)
        made = function(step, *by_source["input"].values(), **named)
        caches = tuple(by_source["cache"].values()) if planned.returns_caches else ()
        return (*(made if isinstance(made, tuple) else (made,)), *caches)

    return run


def _batch(arrays: Mapping[str, Tensor], group: str) -> StepBatch:
    """A step that has only the arrays that the plugin is connected to; the others are empty."""
    empty = np.zeros(0, np.int32)
    held = {name: tensor.numpy().astype(np.int32) for name, tensor in arrays.items() if name != "block_tables"}
    rows = len(held["cu_seqlens"]) - 1 if "cu_seqlens" in held else 0
    tables = {group: arrays["block_tables"].numpy().astype(np.int32)} if "block_tables" in arrays else {}
    tokens = int(held["cu_seqlens"][-1]) if rows else 0
    unread = {"input_ids": np.zeros(tokens, np.int32), "context_lens": np.zeros(rows, np.int32)}
    names = ("positions", "cu_seqlens", "state_src", "state_dst", "logits_indices")
    return StepBatch(**{**unread, **dict.fromkeys(names, empty), **held}, block_tables=tables)


_KINDS: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {  # the layer's class and what it computes
    "ACTIVATION": ("IActivationLayer", lambda layer: _ACTIVATION[layer.type.name]),
    "CAST": ("ICastLayer", _cast),
    "CONCATENATION": ("IConcatenationLayer", _concatenation),
    "CONSTANT": ("IConstantLayer", _constant),
    "DEQUANTIZE": ("IDequantizeLayer", _dequantize),
    "ELEMENTWISE": ("IElementWiseLayer", _elementwise),
    "GATHER": ("IGatherLayer", _gather),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", _matmul),
    "PLUGIN_V3": ("IPluginV3Layer", _plugin),
    "REDUCE": ("IReduceLayer", _reduce),
    "SHAPE": ("IShapeLayer", _shape),
    "SHUFFLE": ("IShuffleLayer", _shuffle),
    "SLICE": ("ISliceLayer", _slice),
    "UNARY": ("IUnaryLayer", lambda layer: _UNARY[layer.op.name]),
}
