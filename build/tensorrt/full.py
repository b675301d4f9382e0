"""Full TensorRT (10.14 and later): builds for the GPU that it runs on."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from hybridtrt.build.tensorrt.backend import AddPlugin, Backend
from hybridtrt.build.tensorrt.call_codec import PluginCall
from hybridtrt.build.tensorrt.plugin import register_plugins

OLDEST = (10, 14)


@cache
def full() -> Backend:
    """Raises `ValueError` where TensorRT is not installed or too old."""
    trt = _module()

    def plugin_layers(network: Any, plans: Sequence[PluginCall]) -> AddPlugin:
        creators = register_plugins(trt, sorted({planned.call.op for planned in plans}))

        def add(planned: PluginCall, inputs: Sequence[Any]) -> Any:
            layer = network.add_plugin_v3(list(inputs), [], creators[planned.call.op].make(planned))
            if layer is None:
                raise ValueError(f"TensorRT refuses the plugin of {planned.call.name} ({planned.call.op})")
            return layer

        return add

    def set_targets(config: Any, compute_capabilities: Sequence[int]) -> None:
        """It builds for the GPU at hand; only kernels are there for all of these."""

    return Backend("tensorrt", trt, plugin_layers, set_targets, times=True)


def _module() -> Any:
    try:
        trt = importlib.import_module("tensorrt")
        version = tuple(int(part) for part in trt.__version__.split(".")[:2])
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"target tensorrt needs NVIDIA TensorRT {'.'.join(map(str, OLDEST))} or later, which is not installed here "
            f"({error}); it comes with NVIDIA's containers. Without a GPU, --target tensorrt-rtx builds"
        ) from None
    if version < OLDEST:
        raise ValueError(f"TensorRT {trt.__version__} is too old: {'.'.join(map(str, OLDEST))} or later is needed")
    return trt
