"""Where each operator lives: a room (folder) an operator family, with its spec and one kernel module a walker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from hybridtrt.plugins.spec import OpSpec

ROOMS = (
    "attention",
    "capacity",
    "causal_conv",
    "embedding",
    "experts",
    "layer_norm",
    "length_routed",
    "linear",
    "linear_attention",
    "low_rank",
    "mla",
    "pointwise",
    "rg_lru",
    "rms_norm",
    "rotary",
    "router",
    "selective_scan",
    "ssd",
)
MODULES = {"reference": "reference", "torch": "vectorized"}  # of the kernels in torch, by walker
WALKERS = (*MODULES, "cpu")


@cache
def _index() -> dict[str, tuple[OpSpec, str]]:
    found: dict[str, tuple[OpSpec, str]] = {}
    for room in ROOMS:
        for op in importlib.import_module(f"hybridtrt.plugins.{room}").SPECS:
            found[op.name] = (op, room)
    return found


def op_names() -> tuple[str, ...]:
    """Names of all operators."""
    return tuple(_index())


def op_spec(name: str) -> OpSpec:
    """Spec of an operator. Raises `ValueError` for an unknown name."""
    if name not in _index():
        raise ValueError(f"op {name!r} is not known; known: {', '.join(sorted(_index()))}")
    return _index()[name][0]


def room_of(name: str) -> str:
    """The room of an operator, by its folder's name. Raises `ValueError` for an unknown name."""
    return _index()[op_spec(name).name][1]


def kernel(name: str, walker: str) -> Callable[..., Any]:
    """The function of `walker` (one of `WALKERS`) that computes an operator.

    `reference` is the definition, `torch` the vectorised form of it, `cpu` the C++ kernel, `gpu` the launches in the
    Triton language of the operators that are plugins on a GPU.
    """
    if walker not in (*WALKERS, "gpu"):
        raise ValueError(f"walker {walker!r} is not known; known: {', '.join(WALKERS)}, gpu")
    spec = op_spec(name)
    if walker == "cpu":
        from hybridtrt.plugins.native.one_op import native_kernel

        return native_kernel(spec)
    if walker == "gpu":
        from hybridtrt.plugins.gpu.torch_launch import torch_launch

        return torch_launch(spec)
    module = importlib.import_module(f"hybridtrt.plugins.{room_of(name)}.{MODULES[walker]}")
    function: Callable[..., Any] = getattr(module, name)
    return function
