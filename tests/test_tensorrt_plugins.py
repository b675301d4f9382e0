"""The plugin class: what TensorRT asks it, how it is serialised and launched; and the ways into a network."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from network_evaluator import NetworkEvaluator
from networks import NUM_SLOTS, Pages, bound, builder, config_of, float64_weights, lowering, page_groups, pools, steps

from hybridtrt.build.tensorrt.bindings import step_bindings
from hybridtrt.build.tensorrt.builder import EngineRequest
from hybridtrt.build.tensorrt.call_codec import FIELD, PluginCall
from hybridtrt.build.tensorrt.full import full
from hybridtrt.build.tensorrt.native import NATIVE
from hybridtrt.build.tensorrt.onnx_node import carrier, onnx_node
from hybridtrt.build.tensorrt.plugin import register_plugins
from hybridtrt.plugins.call import Operand, call_of
from hybridtrt.plugins.gpu.plan import PLUGINS, Sizes
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.registry import op_names
from hybridtrt.plugins.spec import TensorSpec


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


def program_with_token_slots() -> Program:
    program = config_of("qwen3_next").program()
    program.add_input("token_slots", TensorSpec(("T",), "int32"))
    return program


def test_slots_for_tokens_are_an_operand_of_linear_attention(tmp_path: Path) -> None:
    """Where the program has them as an input, and of no other operator; then they are an input of the engine."""
    config = config_of("qwen3_next")
    lowered = lowering(config, "bfloat16")
    without, program = config.program(), program_with_token_slots()
    slots = Operand("token_slots", "step", TensorSpec(("T",), "int32"), "token_slots")
    takers = set()
    for node in program.nodes:
        if node.op in PLUGINS:
            before, call = (call_of(one, node, 4, lowered.dtypes.of) for one in (without, program))
            if call != before:
                assert call.operands == (*before.operands, slots)
                assert call.key != before.key
                assert PluginCall.from_text(PluginCall(call, True, 0).to_text()).call.operands == call.operands
                takers.add(node.op)
    assert takers == {"linear_attention"}
    assert "token_slots" not in step_bindings(without)
    asked = EngineRequest(program, lowered, config.build, config.memory(), (89,))
    assert builder().build(asked, tmp_path / "engine").step["token_slots"] == slots.spec


def test_a_network_leaves_the_state_after_a_token_in_its_slot() -> None:
    """It is the one that the network leaves after a row that ends there."""
    config, program = config_of("qwen3_next"), program_with_token_slots()
    built = builder().network(program, lowering(config, "bfloat16"))
    evaluate, pages = NetworkEvaluator(trt(), built.network), Pages(page_groups(program))
    weights = float64_weights("qwen3_next")
    first = next(steps(program, config.model.vocab_size))
    slot = min({*range(1, NUM_SLOTS)} - {*first.state_src, *first.state_dst})
    slots = np.zeros(first.num_tokens, np.int32)
    slots[2] = slot
    whole = replace(first, token_slots=slots)
    ended = replace(
        first,
        **{name: getattr(first, name)[:3] for name in ("input_ids", "positions")},
        **{name: getattr(first, name)[:1] for name in ("context_lens", "state_src", "state_dst", "logits_indices")},
        cu_seqlens=np.array([0, 3], np.int32),
        block_tables={group: table[:1] for group, table in first.block_tables.items()},
        token_slots=np.zeros(3, np.int32),
    )
    left, wanted = (evaluate({**bound(built, one, pages), **pools(built), **weights}) for one in (whole, ended))
    states = [node.caches["state"] for node in program.nodes if node.op == "linear_attention"]
    assert states
    for name in states:
        output = built.bindings.cache_outputs[name]
        np.testing.assert_allclose(left[output][slot], wanted[output][ended.state_dst[0]], rtol=1e-12)


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
