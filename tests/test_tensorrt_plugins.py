"""The plugin class: what TensorRT asks it, how it is serialised and launched; and the ways into a network."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from networks import builder, config_of, lowering

from hybridtrt.build.tensorrt.call_codec import FIELD, PluginCall
from hybridtrt.build.tensorrt.full import full
from hybridtrt.build.tensorrt.native import NATIVE
from hybridtrt.build.tensorrt.onnx_node import carrier, onnx_node
from hybridtrt.build.tensorrt.plugin import register_plugins
from hybridtrt.plugins.call import call_of
from hybridtrt.plugins.gpu.plan import PLUGINS, Sizes
from hybridtrt.plugins.registry import op_names


def plans(variant: str, returns_caches: bool = True) -> dict[str, PluginCall]:
    """One plugin of each operator of a model."""
    config = config_of(variant)
    dtypes, program = lowering(config, "bfloat16").dtypes, config.program()
    calls = (call_of(program, node, 4, dtypes.of) for node in program.nodes if node.op in PLUGINS)
    return {call.op: PluginCall(call, returns_caches, 512) for call in calls}


def trt() -> Any:
    return builder().backend.trt


def made(planned: PluginCall, launchers: Any = None) -> Any:
    return register_plugins(trt(), [planned.call.op], launchers)[planned.call.op].make(planned)


def test_every_operator_is_native_or_a_plugin() -> None:
    assert set(NATIVE).isdisjoint(PLUGINS)
    assert {*NATIVE, *PLUGINS} == set(op_names())


@pytest.mark.parametrize("variant", ["qwen3_next", "hybridtrt_free_mix.own", "gpt_oss", "nemotron_h"])
def test_calls_survive_as_text(variant: str) -> None:
    for planned in plans(variant).values():
        assert PluginCall.from_text(planned.to_text()) == replace(
            planned, call=replace(planned.call, attributes=dict(planned.call.attributes))
        )


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"op": "ssd"}', '{"op": 1, "operands": [[1]]}'])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a plugin's field 'call' is damaged"):
        PluginCall.from_text(text)


def test_aliases_are_the_caches() -> None:
    planned = plans("hybridtrt_free_mix.own")["low_rank_attention"]
    names = [operand.name for operand in planned.call.operands]
    assert [planned.alias(i) for i in range(len(planned.outputs))] == [-1, names.index("keys"), names.index("values")]
    assert [spec.dtype for spec in planned.outputs] == ["bfloat16", "float32", "float32"]
    unaliased = replace(planned, returns_caches=False)
    assert len(unaliased.outputs) == 1


@pytest.mark.parametrize("variant", ["qwen3_next", "deepseek_v3", "zaya"])
def test_a_plugin_takes_its_dtypes_alone(variant: str) -> None:
    """Linear, in the dtype of the call at each place; any other dtype or format is refused."""
    kinds = {"bfloat16": trt().bfloat16, "float32": trt().float32, "int32": trt().int32}
    linear = trt().TensorFormat.LINEAR
    for planned in plans(variant).values():
        specs = [operand.spec for operand in planned.call.operands] + list(planned.outputs)
        given = [SimpleNamespace(desc=SimpleNamespace(type=kinds[spec.dtype], format=linear)) for spec in specs]
        plugin = made(planned)
        assert plugin.num_outputs == len(planned.outputs)
        assert plugin.get_workspace_size([], []) == 512
        assert [plugin.supports_format_combination(i, given, 0) for i in range(len(given))] == [True] * len(given)
        for i, one in enumerate(given):
            wrong = SimpleNamespace(type=trt().float16, format=linear)
            assert not plugin.supports_format_combination(i, [SimpleNamespace(desc=wrong)] * len(given), 0)
            other = SimpleNamespace(type=one.desc.type, format=trt().TensorFormat.CHW32)
            assert not plugin.supports_format_combination(i, [SimpleNamespace(desc=other)] * len(given), 0)


class Recorder:
    """Remembers launches."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launches: list[tuple[Mapping[str, int], Sizes, int, int]] = []

    def __call__(self, call: Any) -> Recorder:
        self.calls.append(call.name)
        return self

    def launch(self, pointers: Mapping[str, int], sizes: Sizes, scratch: int, stream: int) -> None:
        self.launches.append((dict(pointers), sizes, scratch, stream))


def described(planned: PluginCall, sizes: Mapping[str, int]) -> list[Any]:
    """Shapes of the operands in a step."""
    known = {"T": 7, "B": 3, "B+1": 4, "P": 5, "slots": 9, "pages": 11} | dict(sizes)
    return [
        SimpleNamespace(dims=tuple(known[dim] if isinstance(dim, str) else dim for dim in operand.spec.shape))
        for operand in planned.call.operands
    ]


def test_enqueue_launches_with_operands_by_name_and_sizes_of_the_step() -> None:
    recorder = Recorder()
    planned = plans("jamba")["attention"]
    plugin = made(planned, recorder).clone()
    names = [operand.name for operand in planned.call.operands]
    inputs = [4096 * (i + 1) for i in range(len(names))]
    outputs = [1 << 20, inputs[names.index("kv")]]
    for _ in range(2):
        plugin.enqueue(described(planned, {}), [], inputs, outputs, 77, 5)
    pointers = dict(zip(names, inputs, strict=True)) | {"out": 1 << 20}
    assert recorder.launches == [(pointers, Sizes(T=7, B=3, P=5), 77, 5)] * 2
    assert recorder.calls == [planned.call.name]


def test_a_copied_cache_is_noticed() -> None:
    planned = plans("mamba2")["ssd"]
    plugin = made(planned, Recorder())
    inputs = [4096 * (i + 1) for i in range(len(planned.call.operands))]
    with pytest.raises(ValueError, match=r"cache layers\.\d\.mamba2\.state was copied, not aliased"):
        plugin.enqueue(described(planned, {}), [], inputs, [1 << 20, 2 << 20], 0, 0)


def test_a_plugin_without_kernels_says_so() -> None:
    from hybridtrt.build.tensorrt.plugin import no_launcher

    plugin = made(plans("mamba2")["ssd"], no_launcher)
    with pytest.raises(ValueError, match=r"\(ssd\): this process has no kernels to run the plugin with"):
        plugin.enqueue([], [], [], [], 0, 0)


def test_a_creator_reads_what_a_plugin_wrote() -> None:
    """With the closing zero that a text attribute of ONNX has, and without."""
    planned = plans("qwen3_next")["linear_attention"]
    plugin = made(planned)  # whose memory the field is
    (field,) = list(plugin.get_fields_to_serialize())
    creator = register_plugins(trt(), ["linear_attention"])["linear_attention"]
    data = np.asarray(field.data)
    for bytes_read in (data, np.append(data, np.int8(0))):
        again = creator.create_plugin("x", [SimpleNamespace(name=FIELD, data=bytes_read)], None)
        assert again.planned.to_text() == planned.to_text()
    other = register_plugins(trt(), ["ssd"])["ssd"]
    with pytest.raises(ValueError, match="is a call of linear_attention, not of ssd"):
        other.create_plugin("x", [field], None)


def test_the_onnx_node_of_a_call() -> None:
    planned = plans("mamba2")["ssd"]
    names = [operand.name for operand in planned.call.operands]
    node = onnx_node(planned, names, ["y", "state.out"])
    assert (node.op_type, node.domain, node.name) == ("ssd", "hybridtrt", planned.call.name)
    assert list(node.input) == names
    assert PluginCall.from_text(onnx.helper.get_node_attr_value(node, FIELD).decode()).call.op == "ssd"
    model = onnx.load_from_string(carrier(list(plans("mamba2").values())))
    assert {one.op_type for one in model.graph.node} == set(plans("mamba2"))
    assert len(model.SerializeToString()) < 1 << 16  # no weight is in it


def fake_tensorrt(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """TensorRT-RTX under the name and with the registry of full TensorRT."""
    fake = ModuleType("tensorrt")
    fake.__dict__.update(trt().__dict__)
    fake.__dict__["__version__"] = version
    fake.__dict__["get_plugin_registry"] = lambda: SimpleNamespace(register_creator=lambda creator, namespace: True)
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    full.cache_clear()
    return fake


def test_full_tensorrt_gets_plugins_by_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt(monkeypatch, "10.14.1")
    added: list[Any] = []
    network = SimpleNamespace(
        add_plugin_v3=lambda inputs, shapes, plugin: added.append((inputs, shapes, plugin)) or "layer"
    )
    planned = plans("mamba2")["ssd"]
    chosen = full()
    assert chosen.plugin_layers(network, [planned])(planned, ["a", "b"]) == "layer"
    ((inputs, shapes, plugin),) = added
    assert (inputs, shapes, plugin.planned) == (["a", "b"], [], planned)
    network.add_plugin_v3 = lambda *args: None
    with pytest.raises(ValueError, match=r"TensorRT refuses the plugin of layers\.\d\.mamba2\.core \(ssd\)"):
        chosen.plugin_layers(network, [planned])(planned, [])


def test_full_tensorrt_that_is_absent_or_old_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt(monkeypatch, "10.9.0.34")
    with pytest.raises(ValueError, match=r"TensorRT 10\.9\.0\.34 is too old: 10\.14 or later is needed"):
        full()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ValueError, match=r"needs NVIDIA TensorRT 10\.14 or later, which is not installed") as error:
        full()
    assert "\n" not in str(error.value)
    full.cache_clear()
