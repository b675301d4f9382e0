"""A TensorRT engine on the current GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtrt.build.tensorrt.logger import make_logger
from hybridtrt.build.tensorrt.plugin import Launchers, register_plugins
from hybridtrt.plugins.gpu.plan import PLUGINS


class TensorRTContext:
    """Implements `Context`."""

    def __init__(self, context: Any, inputs: frozenset[str], logger: Any) -> None:
        self._context, self._inputs, self._logger = context, inputs, logger

    def bind(self, name: str, address: int, shape: Sequence[int]) -> None:
        if name in self._inputs and not self._context.set_input_shape(name, tuple(shape)):
            raise ValueError(f"TensorRT does not take {name} in the shape {tuple(shape)}: {self._logger.first_error()}")
        if not self._context.set_tensor_address(name, address):
            raise ValueError(f"TensorRT does not take the address of {name}: {self._logger.first_error()}")

    def can_be_captured(self, stream: int) -> bool:
        asks = getattr(self._context, "is_stream_capturable", None)  # of TensorRT-RTX
        return asks is None or bool(asks(stream))

    def execute(self, stream: int) -> None:
        self._logger.errors.clear()
        if not self._context.execute_async_v3(stream):
            raise ValueError(f"TensorRT does not run the step: {self._logger.first_error()}")


class TensorRTEngine:
    """Implements `Engine` with one of the TensorRT modules, `trt`."""

    def __init__(self, trt: Any, path: Path, launchers: Launchers, stream: int) -> None:
        """Raises `ValueError`, with TensorRT's words, for a file that it does not load."""
        self._trt, self._stream = trt, stream
        self._logger = make_logger(trt)
        register_plugins(trt, PLUGINS, launchers)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise ValueError(f"{path}: TensorRT does not load the engine: {self._logger.first_error()}")
        every = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.names = frozenset(every)
        self._inputs = frozenset(name for name in every if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)

    @property
    def scratch_bytes(self) -> int:
        return int(self._engine.device_memory_size_v2)

    def context(self, profile: int, scratch: int) -> TensorRTContext:
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise ValueError(f"TensorRT makes no execution context: {self._logger.first_error()}")
        context.set_device_memory(scratch, self.scratch_bytes)
        if not context.set_optimization_profile_async(profile, self._stream):
            raise ValueError(f"TensorRT does not take optimization profile {profile}: {self._logger.first_error()}")
        return TensorRTContext(context, self._inputs, self._logger)
