"""Runners of tiny engines with pools of any size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engines import tiny_engine
from host_device import HostDevice, HostEngine

from hybridtrt.build.engine import read_engine_config
from hybridtrt.plugins.caches import PageSpec, pages_held
from hybridtrt.runtime.gpu.runner import TensorRTRunner
from hybridtrt.runtime.load import RuntimeOptions, make_runner, open_packed, runner_info
from hybridtrt.runtime.load_torch import unpacked
from hybridtrt.runtime.runner import Runner


def tiny_runner(
    variant: str,
    target: str = "cpu",
    *,
    longest: int,
    spare: float,
    window_spare: float | None = None,
    num_slots: int,
    **limits: Any,
) -> Runner:
    """A runner whose pools hold one sequence of `longest` tokens and `spare` times as many pages besides.

    Page groups with a window have `window_spare` times as many besides, if it is given. With target "gpu" it is the
    TensorRT runner on host memory.
    """
    folder = tiny_engine(variant)
    config = read_engine_config(folder)
    info = replace(runner_info(config, RuntimeOptions()), page_size=4, num_slots=num_slots, **limits)
    num_pages = {}
    for spec in info.caches:
        if isinstance(spec, PageSpec):
            pages = pages_held(longest, info.page_size, spec.window, spec.limit, info.max_num_tokens)
            times = spare if spec.window is None or window_spare is None else window_spare
            num_pages[spec.group] = 1 + math.ceil((1 + times) * pages)
    info, packed = replace(info, num_pages=num_pages), open_packed(folder, config)
    if target == "gpu":
        device = HostDevice()
        engine = HostEngine(device, *unpacked(config, packed))
        return TensorRTRunner(info, device, engine, engine.outputs)
    return make_runner(config, packed, info, RuntimeOptions())
