"""The two TensorRTs that a network can be built by, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrt.build.tensorrt.call_codec import PluginCall

AddPlugin = Callable[[PluginCall, Sequence[Any]], Any]  # the layer of a call on these `trt.ITensor`s


@dataclass(frozen=True)
class Backend:
    """`trt` is the module. What differs between the two:

    `plugin_layers(network, plans)` is called on an empty network with all calls that will become plugin layers, and
    returns what makes the layer of one. `set_targets(config, compute_capabilities)` says which GPUs an engine is for.
    `times` says whether building measures kernels, so that a timing cache is of use.
    """

    name: str
    trt: Any
    plugin_layers: Callable[[Any, Sequence[PluginCall]], AddPlugin]
    set_targets: Callable[[Any, Sequence[int]], None]
    times: bool


def backend(name: str) -> Backend:
    """The backend of a build target, "tensorrt" or "tensorrt-rtx".

    Raises `ValueError` for another name and where that TensorRT is not installed.
    """
    if name == "tensorrt-rtx":
        from hybridtrt.build.tensorrt.rtx import rtx

        return rtx()
    if name == "tensorrt":
        from hybridtrt.build.tensorrt.full import full

        return full()
    raise ValueError(f"target {name!r} is not one of tensorrt, tensorrt-rtx")
