"""From a program to a serialized engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtrt.build.engine import BuildConfig
from hybridtrt.build.tensorrt.backend import Backend
from hybridtrt.build.tensorrt.bindings import Bindings
from hybridtrt.build.tensorrt.interrupts import interrupts_held
from hybridtrt.build.tensorrt.logger import make_logger, make_monitor
from hybridtrt.build.tensorrt.network import BuiltNetwork, Lowering, build_network
from hybridtrt.build.tensorrt.profiles import PHASES, dim_ranges, shape_ranges
from hybridtrt.converters.memory import MemoryPlan
from hybridtrt.plugins.program import Program

Progress = Callable[[str, int, int], None]  # phase, steps done, steps


@dataclass(frozen=True)
class EngineRequest:
    """What an engine is built from: the program with its lowering, and the limits for its profiles.

    `compute_capabilities` are those that TensorRT-RTX builds for; full TensorRT builds for the GPU at hand. The builder
    reads `timing_cache` and writes it back, where there is one.
    """

    program: Program
    lowering: Lowering
    limits: BuildConfig
    pools: MemoryPlan
    compute_capabilities: tuple[int, ...] = ()
    timing_cache: Path | None = None


class EngineBuilder:
    """A TensorRT builder with its logger; makes networks, and engines from them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.logger = make_logger(backend.trt)
        self._builder = backend.trt.Builder(self.logger)

    def network(self, program: Program, lowering: Lowering) -> BuiltNetwork:
        """The network of a program. Raises `ValueError` with TensorRT's words where it refuses one."""
        self.logger.errors.clear()
        flags = self.backend.trt.NetworkDefinitionCreationFlag
        # From release 11 on every network is strongly typed, and there is no flag.
        typed = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        try:
            return build_network(self.backend, self._builder.create_network(typed), program, lowering)
        except ValueError as error:
            words = f" ({self.logger.first_error()})" if self.logger.errors else ""
            raise ValueError(f"{error}{words}") from None

    def build(
        self, request: EngineRequest, path: Path, progress: Progress = lambda phase, done, steps: None
    ) -> Bindings:
        """Write the serialized engine to a file as it is made, and return what it is called with.

        Raises `ValueError` with one line where TensorRT does not build it.
        """
        with interrupts_held() as stopped:
            built = self.network(request.program, request.lowering)
            config = self._config(request, built.bindings, progress, stopped)
            with path.open("wb") as file:
                made = self._builder.build_serialized_network_to_stream(
                    built.network, config, _writer(self.backend.trt, file.write)
                )
            if not made:
                raise ValueError(f"{self.backend.name} does not build the network: {self.logger.first_error()}")
        self._keep_timings(request, config)
        return built.bindings

    def _config(
        self, request: EngineRequest, bindings: Bindings, progress: Progress, stopped: Callable[[], bool]
    ) -> Any:
        trt = self.backend.trt
        config = self._builder.create_builder_config()
        self.backend.set_targets(config, request.compute_capabilities)
        config.clear_flag(trt.BuilderFlag.TF32)  # what is float32 is so for its precision
        if request.lowering.return_caches:
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        for phase in PHASES:
            ranges = dim_ranges(request.limits, request.pools, bindings, phase)
            profile = self._builder.create_optimization_profile()
            for name, shapes in shape_ranges(bindings, ranges).items():
                profile.set_shape(name, *shapes)
            config.add_optimization_profile(profile)
        config.progress_monitor = make_monitor(trt, progress, stopped)
        if self.backend.times and request.timing_cache is not None:
            stored = request.timing_cache.read_bytes() if request.timing_cache.is_file() else b""
            if not config.set_timing_cache(config.create_timing_cache(stored), False):  # of another GPU or release
                config.set_timing_cache(config.create_timing_cache(b""), False)
        return config

    def _keep_timings(self, request: EngineRequest, config: Any) -> None:
        if self.backend.times and request.timing_cache is not None:
            request.timing_cache.parent.mkdir(parents=True, exist_ok=True)
            request.timing_cache.write_bytes(bytes(memoryview(config.get_timing_cache().serialize())))


def _writer(trt: Any, write: Callable[[Any], Any]) -> Any:
    """Takes the engine piece by piece, so that it is never whole in memory."""

    def start(self: Any) -> None:
        trt.IStreamWriter.__init__(self)

    def take(self: Any, data: Any) -> int:
        return int(write(data))

    return type("EngineFile", (trt.IStreamWriter,), {"__init__": start, "write": take})()
