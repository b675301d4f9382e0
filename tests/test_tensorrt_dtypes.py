"""Dtypes of every tensor of the lowered networks, which the arithmetic check does not see."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import TINY
from networks import builder, config_of, lowering, network, precise

from hybridtrt.build.tensorrt.dtypes import network_dtypes
from hybridtrt.build.tensorrt.trt_dtypes import dtype_name
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.spec import TensorSpec


def layers_of(built: Any) -> list[Any]:
    return [built.network.get_layer(i) for i in range(built.network.num_layers)]


def tensors(layer: Any) -> list[Any]:
    return [layer.get_output(i) for i in range(layer.num_outputs)]


@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", TINY)
def test_every_tensor_has_the_dtype_that_it_should_have(variant: str, activation: str) -> None:
    """Products are of matrices in the dtype of the activations, or of two in float32; sums of norms are float32."""
    config = config_of(variant)
    built = network(config, activation)
    trt = builder().backend.trt
    for layer in layers_of(built):
        kind = layer.type.name
        types = {dtype_name(trt, tensor.dtype) for tensor in tensors(layer)}
        given = [layer.get_input(i) for i in range(layer.num_inputs)]
        taken = [dtype_name(trt, tensor.dtype) for tensor in given if tensor is not None]
        if kind == "MATRIX_MULTIPLY":
            weight = built.bindings.weights[given[1].name]
            whole = given[1].name in precise(config)
            assert weight.dtype == ("float32" if whole else activation), layer.name
            assert types == {weight.dtype} == set(taken), layer.name
        elif kind in ("UNARY", "REDUCE", "ACTIVATION"):
            assert types == {"float32"} == set(taken), layer.name
        elif kind in ("SHAPE", "CONSTANT"):
            assert types <= {"int64", "float32", "int32", activation}, layer.name
        else:
            assert types <= {"float32", "int32", "int64", activation}, layer.name
    expect_values(built, config.program(), activation)
    assert {name: spec.dtype for name, spec in built.bindings.weights.items()} == {
        name: "float32" if name in precise(config) else activation for name in config.program().weights
    }
    assert built.bindings.logits == TensorSpec(("R", config.model.vocab_size), "float32")


def expect_values(built: Any, program: Program, activation: str) -> None:
    """What plugins take and give, by the rules and not by `network_dtypes`."""
    trt = builder().backend.trt
    plugins = {layer.name: layer for layer in layers_of(built) if layer.type == trt.LayerType.PLUGIN_V3}
    for node in program.nodes:
        if node.name not in plugins:
            continue
        layer = plugins[node.name]
        results = [dtype_name(trt, tensor.dtype) for tensor in tensors(layer)][: len(node.outputs)]
        inputs = [dtype_name(trt, layer.get_input(i).dtype) for i in range(len(node.inputs))]
        wanted = {
            "router": (["float32"], ["float32", "int32"]),
            "capacity": (["float32", "int32"], ["float32", "int32", "int32", "int32"]),
            "experts": ([activation, "float32", "int32"], [activation]),
        }.get(node.op, ([activation] * len(node.inputs), [activation]))
        assert (inputs, results) == wanted, node.name
        caches = [dtype_name(trt, tensor.dtype) for tensor in tensors(layer)][len(node.outputs) :]
        assert caches == [program.caches[name].dtype for name in node.caches.values()], node.name


@pytest.mark.parametrize("variant", ["jamba", "minimax"])
def test_pages_and_states_have_the_dtypes_of_the_build_config(variant: str) -> None:
    config = config_of(variant, kv_cache_dtype="bfloat16", state_dtype="float16")
    caches = network(config, "bfloat16").bindings.caches
    assert {spec.dtype for spec in caches.values() if spec.shape[0] == "slots"} == {"float16"}
    assert {spec.dtype for spec in caches.values() if spec.shape[0] != "slots"} == {"bfloat16"}


def test_layers_are_named_after_the_nodes() -> None:
    """Every node has a layer of its name or layers that begin with it; no two layers have one name."""
    for variant in ("qwen3_next", "zamba2"):
        config = config_of(variant)
        names = [layer.name for layer in layers_of(network(config, "bfloat16"))]
        assert len(set(names)) == len(names)
        emitted = {name.partition("/")[0] for name in names}
        trivial = {"split", "scale"}  # nothing is left of a split into one part or a scale of 1
        assert {node.name for node in config.program().nodes if node.op not in trivial} <= emitted


def test_other_activations_are_refused() -> None:
    config = config_of("jamba")
    with pytest.raises(ValueError, match="activation dtype 'int8' is not one of float16, bfloat16, float32"):
        network_dtypes(config.program(), precise(config), "int8")


def test_a_node_that_nothing_computes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtrt.build.tensorrt import network as walk

    config = config_of("jamba")
    monkeypatch.setattr(walk, "NATIVE", {name: f for name, f in walk.NATIVE.items() if name != "rms_norm"})
    with pytest.raises(ValueError, match=r"layers\.0\.\w+\.pre_norm \(rms_norm\): TensorRT has neither"):
        builder().network(config.program(), lowering(config, "bfloat16"))
