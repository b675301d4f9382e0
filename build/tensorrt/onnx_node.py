"""A plugin as an ONNX node, and a model of such nodes alone: one way of getting plugins into a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtrt.build.tensorrt.call_codec import FIELD, NAMESPACE, VERSION, PluginCall
from hybridtrt.plugins.caches import DTYPE_BYTES
from hybridtrt.plugins.spec import TensorSpec

OPSET = 20
_ONNX = {
    **{"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "fp8": "FLOAT8E4M3FN"},
    **{"int8": "INT8", "int32": "INT32", "int64": "INT64"},
}


def onnx_node(planned: PluginCall, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The node of a call, in the domain of our plugins. Its fields become the plugin's."""
    fields = {"plugin_version": VERSION, "plugin_namespace": NAMESPACE, FIELD: planned.to_text()}
    call = planned.call
    return _onnx().helper.make_node(call.op, list(inputs), list(outputs), name=call.name, domain=NAMESPACE, **fields)


def carrier(plans: Sequence[PluginCall]) -> bytes:
    """A model that has each call as a node on constants of the right dtypes and ranks; every dimension is 1."""
    helper = _onnx().helper
    constants: dict[str, Any] = {}
    nodes, outputs = [], []
    for planned in plans:
        operands = [_constant(constants, operand.spec) for operand in planned.call.operands]
        specs = planned.outputs
        results = [f"{planned.call.name}:{i}" for i in range(len(specs))]
        nodes.append(onnx_node(planned, operands, results))
        outputs += [
            helper.make_tensor_value_info(name, _dtype(spec.dtype), [1] * len(spec.shape))
            for name, spec in zip(results, specs, strict=True)
        ]
    graph = helper.make_graph(nodes, "plugins", [], outputs, list(constants.values()))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets).SerializeToString()
    return model


def _constant(constants: dict[str, Any], spec: TensorSpec) -> str:
    rank = len(spec.shape)
    name = f"{spec.dtype}.{rank}"
    if name not in constants:
        data = bytes(DTYPE_BYTES[spec.dtype])
        constants[name] = _onnx().helper.make_tensor(name, _dtype(spec.dtype), [1] * rank, data, raw=True)
    return name


def _dtype(name: str) -> int:
    return int(getattr(_onnx().TensorProto, _ONNX[name]))


def _onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise ValueError("plugins for TensorRT-RTX need the package onnx: pip install onnx") from None
    return onnx
