"""TensorRT-RTX: builds engines for several GPU generations, on machines without any."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hybridtrt.build.tensorrt.backend import AddPlugin, Backend
from hybridtrt.build.tensorrt.call_codec import PluginCall
from hybridtrt.build.tensorrt.onnx_node import carrier
from hybridtrt.build.tensorrt.plugin import register_plugins
from hybridtrt.build.tensorrt.rtx_libraries import tensorrt_rtx


@cache
def rtx() -> Backend:
    """Raises `ValueError` where TensorRT-RTX is not installed."""
    trt = tensorrt_rtx()

    def plugin_layers(network: Any, plans: Sequence[PluginCall]) -> AddPlugin:
        """Python has no `add_plugin_v3` there: the ONNX parser makes the layers, which get other inputs afterwards."""
        layers = _parsed(trt, network, plans) if plans else {}

        def add(planned: PluginCall, inputs: Sequence[Any]) -> Any:
            layer = layers.pop(planned.call.name)
            for i, tensor in enumerate(inputs):
                layer.set_input(i, tensor)
            return layer

        return add

    def set_targets(config: Any, compute_capabilities: Sequence[int]) -> None:
        config.num_compute_capabilities = len(compute_capabilities)
        for i, capability in enumerate(compute_capabilities):
            kind = getattr(trt.ComputeCapability, f"SM{capability}", None)
            if kind is None:
                raise ValueError(f"TensorRT-RTX {trt.__version__} does not build for compute capability {capability}")
            config.set_compute_capability(kind, i)
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # memory of its own would forbid CUDA graphs

    return Backend("tensorrt-rtx", trt, plugin_layers, set_targets, times=False)


def _parsed(trt: Any, network: Any, plans: Sequence[PluginCall]) -> dict[str, Any]:
    """Layers of the calls by name, on constants."""
    register_plugins(trt, sorted({planned.call.op for planned in plans}))
    parser = trt.OnnxParser(network, network.builder.logger)
    if not parser.parse(carrier(plans)):
        errors = "; ".join(str(parser.get_error(i).desc()) for i in range(parser.num_errors))
        raise ValueError(f"TensorRT-RTX does not take the plugins: {errors}")
    while network.num_outputs:
        network.unmark_output(network.get_output(0))
    made = (network.get_layer(i) for i in range(network.num_layers))
    layers = {layer.name: layer for layer in made if layer.type == trt.LayerType.PLUGIN_V3}
    if len(layers) != len(plans):
        raise ValueError(f"TensorRT-RTX made {len(layers)} plugin layers of {len(plans)} calls")
    return layers
