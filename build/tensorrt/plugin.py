"""Every operator as a TensorRT plugin, `IPluginV3`: one class, which derives all from the call that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from hybridtrt.build.tensorrt.call_codec import FIELD, NAMESPACE, VERSION, PluginCall
from hybridtrt.build.tensorrt.trt_dtypes import trt_dtype
from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.plan import Sizes
from hybridtrt.plugins.spec import Dim


class Launcher(Protocol):
    """What runs a call's kernels on a GPU."""

    def launch(self, pointers: Mapping[str, int], sizes: Sizes, scratch: int, stream: int) -> None:
        """Put the launches of a step into a stream; `pointers` has operands and results by name."""


Launchers = Callable[[Call], Launcher]


def no_launcher(call: Call) -> Launcher:
    """For processes that only describe plugins. Raises `ValueError` when a plugin is to run."""
    raise ValueError(f"{call.name} ({call.op}): this process has no kernels to run the plugin with")


# Every clone stays: where a build fails, TensorRT-RTX 1.7 frees clones that Python has freed before.
_clones: list[Any] = []


class PluginMethods:
    """The methods of the plugin class; `plugin_classes` joins them with TensorRT's interfaces."""

    trt: Any  # of the class

    def describe(self, planned: PluginCall, launchers: Launchers) -> None:
        """Say what the plugin stands for, and what will run it."""
        self.planned, self._launchers = planned, launchers
        self._launcher: Launcher | None = None
        self.plugin_name, self.plugin_version, self.plugin_namespace = planned.call.op, VERSION, NAMESPACE
        self.num_outputs = len(planned.outputs)

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def clone(self) -> Any:
        twin = type(self)()
        twin.describe(self.planned, self._launchers)
        _clones.append(twin)
        return twin

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [trt_dtype(self.trt, spec.dtype) for spec in self.planned.outputs]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        """Symbols are taken from the operands that have them, whole numbers from the call."""
        found: dict[Dim, Any] = {}
        for operand, dims in zip(self.planned.call.operands, inputs, strict=True):
            for axis, dim in enumerate(operand.spec.shape):
                found.setdefault(dim, dims[axis])
        shapes = []
        for spec in self.planned.outputs:
            exprs = self.trt.DimsExprs(len(spec.shape))
            for axis, dim in enumerate(spec.shape):
                exprs[axis] = found[dim] if isinstance(dim, str) else builder.constant(int(dim))
            shapes.append(exprs)
        return shapes

    def get_aliased_input(self, output: int) -> int:
        return self.planned.alias(output)

    def supports_format_combination(self, position: int, descriptions: Sequence[Any], num_inputs: int) -> bool:
        specs = (*(operand.spec for operand in self.planned.call.operands), *self.planned.outputs)
        given = descriptions[position].desc
        return bool(
            given.type == trt_dtype(self.trt, specs[position].dtype) and given.format == self.trt.TensorFormat.LINEAR
        )

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Nothing depends on it: kernels are chosen by the call."""

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        """There is one."""

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self.planned.scratch_bytes

    def get_fields_to_serialize(self) -> Any:
        # TensorRT reads this memory later, so it belongs to the plugin.
        self._text = np.frombuffer(self.planned.to_text().encode(), np.int8)
        self._field = self.trt.PluginField(FIELD, self._text, self.trt.PluginFieldType.CHAR)
        self._fields = self.trt.PluginFieldCollection([self._field])
        return self._fields

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Shapes come with every enqueue."""

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch the kernels. Raises `ValueError` where a cache did not come as the memory of its operand."""
        call = self.planned.call
        if self._launcher is None:
            self._launcher = self._launchers(call)
        for output, address in enumerate(outputs):
            operand = self.planned.alias(output)
            if operand >= 0 and inputs[operand] != address:
                raise ValueError(f"{call.name}: cache {call.operands[operand].bound_to} was copied, not aliased")
        pointers = dict(zip((operand.name for operand in call.operands), inputs, strict=True))
        pointers |= dict(zip(call.result_names(), outputs[: len(call.results)], strict=True))
        self._launcher.launch(pointers, self._sizes([tuple(given.dims) for given in input_desc]), workspace, stream)

    def _sizes(self, shapes: Sequence[Sequence[int]]) -> Sizes:
        found = {"T": 0, "B": 0, "P": 0}
        for operand, shape in zip(self.planned.call.operands, shapes, strict=True):
            for dim, size in zip(operand.spec.shape, shape, strict=True):
                if dim == "B+1":
                    found["B"] = size - 1
                elif dim in found:
                    found[str(dim)] = size
        return Sizes(**found)


class CreatorMethods:
    """The methods of the class that makes plugins of one operator."""

    trt: Any
    plugin_class: Any

    def describe(self, op: str) -> None:
        self.name, self.plugin_version, self.plugin_namespace = op, VERSION, NAMESPACE
        self.launchers: Launchers = no_launcher
        field = self.trt.PluginField(FIELD, np.array([], np.int8), self.trt.PluginFieldType.CHAR)
        self.field_names = self.trt.PluginFieldCollection([field])

    def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
        """Raises `ValueError` for fields that are not those of a call of this operator."""
        found = [np.asarray(field.data).view(np.uint8).tobytes() for field in fields if field.name == FIELD]
        return self.make(PluginCall.from_text(b"".join(found).rstrip(b"\0").decode()))

    def make(self, planned: PluginCall) -> Any:
        """A plugin for a call. Raises `ValueError` for a call of another operator."""
        if planned.call.op != self.name:
            raise ValueError(f"{planned.call.name} is a call of {planned.call.op}, not of {self.name}")
        plugin = self.plugin_class()
        plugin.describe(planned, self.launchers)
        return plugin


@cache
def _classes(trt: Any) -> tuple[Any, Any]:
    """The plugin class and its creator's, for one TensorRT module."""
    interfaces = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    def start_plugin(self: Any) -> None:
        for interface in interfaces:
            interface.__init__(self)

    def start_creator(self: Any) -> None:
        trt.IPluginCreatorV3One.__init__(self)

    plugin = type("HybridPlugin", (PluginMethods, *interfaces), {"__init__": start_plugin, "trt": trt})
    made = {"__init__": start_creator, "trt": trt, "plugin_class": plugin}
    return plugin, type("HybridPluginCreator", (CreatorMethods, trt.IPluginCreatorV3One), made)


@cache
def _creators(trt: Any) -> dict[str, Any]:
    return {}


def register_plugins(trt: Any, ops: Sequence[str], launchers: Launchers | None = None) -> dict[str, Any]:
    """Register a creator for each operator with a TensorRT module, once a process, and return them by name.

    Plugins that are made from then on run by what `launchers` gives for a call; None leaves that as it is. Raises
    `ValueError` where TensorRT refuses one.
    """
    creators = _creators(trt)
    for op in ops:
        if op not in creators:
            creator = _classes(trt)[1]()
            creator.describe(op)
            if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
                raise ValueError(f"TensorRT refuses the plugin {op}: is another one of that name registered?")
            creators[op] = creator
        if launchers is not None:
            creators[op].launchers = launchers
    return {op: creators[op] for op in ops}
