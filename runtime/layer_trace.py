"""The residual stream after every layer: in our program and, by forward hooks, in transformers' model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridtrt.plugins.program import Program
from hybridtrt.runtime.forward import prefill_steps
from hybridtrt.runtime.runner import TracingRunner

Stream = list[NDArray[np.float32]]  # `[T, hidden]` before the first layer, then after each layer


def stream_names(program: Program) -> list[str]:
    """The values of a program that are the residual stream, each layer's last one."""
    after: dict[str, str] = {}
    before = ""
    for node in program.nodes:
        if node.name.startswith("layers."):
            before = before or node.inputs[0]
            after[node.name.split(".")[1]] = node.outputs[0]
    return [before, *after.values()]


def our_stream(runner: TracingRunner, input_ids: Sequence[int]) -> Stream:
    """The stream of one sequence, in as few steps as the engine's limits allow."""
    names = stream_names(runner.program)
    runner.clear_slots([1])
    steps = [runner.trace(batch, names) for batch in prefill_steps(runner.info, input_ids)]
    return [np.concatenate([step[name] for step in steps]) for name in names]


@torch.inference_mode()
def oracle_stream(oracle: Any, input_ids: Sequence[int], num_layers: int) -> Stream:
    """The stream of transformers' full forward. Raises `ValueError` if it has no list of so many layers."""
    layers = _decoder_layers(oracle, num_layers)
    stream: Stream = []

    def keep(value: Any) -> None:
        stream.append((value[0] if isinstance(value, tuple) else value)[0].float().numpy())

    def keep_input(_module: Any, args: Any, kwargs: Any) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as hooks:
        hooks.callback(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True).remove)
        for layer in layers:
            hooks.callback(layer.register_forward_hook(lambda _module, _args, output: keep(output)).remove)
        oracle(input_ids=torch.tensor([list(input_ids)]), use_cache=False)
    return stream


def _decoder_layers(oracle: Any, num_layers: int) -> Any:
    found = [
        (len(name), module)
        for name, module in oracle.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.endswith("layers") and len(module) == num_layers
    ]
    if not found:
        raise ValueError(f"transformers' {type(oracle).__name__} has no list of {num_layers} layers to compare with")
    return min(found, key=lambda item: item[0])[1]
