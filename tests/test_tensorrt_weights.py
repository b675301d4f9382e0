"""Weights as constants and as inputs, in full and in few bits, and caches that are not returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import (
    builder,
    checkpoint,
    config_of,
    evaluated,
    expected,
    float64_weights,
    network,
    request,
    worst_error,
)
from torch import Tensor

from hybridtrt.build.tensorrt.quantization import Quantization, quantized, quantized_specs, scale_name
from hybridtrt.build.tensorrt.quantized_experts import expert_specs, quantized_experts
from hybridtrt.build.tensorrt.stored import quantizations_of
from hybridtrt.build.tensorrt.weights import StoredWeight
from hybridtrt.plugins.linear.packing import integers
from hybridtrt.plugins.spec import TensorSpec

CLOSE = 1e-4  # of the logits' standard deviation
FORMS = [("int8", 0), ("int8", 32), ("int4", 32), ("fp8", 0)]


@pytest.mark.parametrize("variant", ["qwen3_next", "zamba2", "deepseek_v3"])
def test_constants_hold_the_checkpoints_weights(variant: str) -> None:
    config = config_of(variant)
    built = network(config, "float32", read=checkpoint(variant).tensor)
    assert not built.bindings.weights
    found = evaluated(built, config.program(), config.model.vocab_size, {})
    assert worst_error(found, expected(config, checkpoint(variant).tensor)) < CLOSE


def test_a_weight_that_two_nodes_share_is_there_once() -> None:
    config = config_of("zamba2")
    built = network(config, "bfloat16")
    names = [built.network.get_input(i).name for i in range(built.network.num_inputs)]
    assert sorted(set(names)) == sorted(names)
    assert set(config.program().weights) <= set(names)


@pytest.mark.parametrize("variant", ["gemma3_text", "mamba2"])
def test_caches_that_are_not_returned_are_written_through_their_inputs(variant: str) -> None:
    """The plugins overwrite the pools: the evaluator keeps them in place either way."""
    config = config_of(variant)
    built = network(config, "bfloat16", return_caches=False)
    assert not built.bindings.cache_outputs
    assert built.network.num_outputs == 1
    assert not {f"{name}.out" for name in built.bindings.caches} & set(outputs_of(built))
    found = evaluated(built, config.program(), config.model.vocab_size, float64_weights(variant))
    assert worst_error(found, expected(config, checkpoint(variant).tensor)) < CLOSE


def outputs_of(built: Any) -> list[str]:
    layers = [built.network.get_layer(i) for i in range(built.network.num_layers)]
    return [layer.get_output(i).name for layer in layers for i in range(layer.num_outputs)]


def stored(variant: str, form: str, group: int) -> tuple[dict[str, Quantization], dict[str, Tensor], dict[str, Tensor]]:
    """The quantised matrices, the network's inputs, and the weights that these stand for."""
    config = config_of(variant, weights=form, group_size=group or None, compute_capabilities=(89,))
    found = quantizations_of(config)
    inputs, meant = float64_weights(variant), float64_weights(variant)
    for name, how in found.items():
        if meant[name].dim() == 3:
            tensors = quantized_experts(name, meant[name], how)
            floats = {part: x.double() if x.is_floating_point() else x for part, x in tensors.items()}
            inputs |= floats
            width = meant[name].shape[2]
            each = zip(floats[name], floats[scale_name(name)], strict=True)
            meant[name] = torch.stack([meant_by(*expert, width) for expert in each])
            continue
        tensors = quantized(name, meant[name], how, "float32")
        numbers, scales = unpacked(tensors[name], how), tensors[scale_name(name)].double()
        inputs |= {name: numbers, scale_name(name): scales}
        wide = scales if how.form == "fp8" else scales.reshape(len(numbers), -1)
        groups = 1 if how.form == "fp8" else numbers.shape[1] // wide.shape[1]
        meant[name] = numbers * (wide if how.form == "fp8" else wide.repeat_interleave(groups, 1))
    return found, inputs, meant


def meant_by(numbers: Tensor, scales: Tensor, width: int) -> Tensor:
    """The matrix of an expert, number by number."""
    found = torch.empty(len(numbers), width, dtype=torch.float64)
    group = width // scales.shape[1] if scales.dim() == 2 else width
    for k in range(width):
        place, i = k // group, k % group
        by = scales[:, place] if scales.dim() == 2 else scales
        if numbers.shape[1] == width:
            found[:, k] = numbers[:, k] * by
            continue
        pair = numbers[:, place * group // 2 + i % (group // 2)].int() & 255
        half = pair & 15 if i < group // 2 else pair >> 4
        found[:, k] = torch.where(half > 7, half - 16, half) * by
    return found


def unpacked(numbers: Tensor, how: Quantization) -> Tensor:
    if how.form != "int4":
        return numbers.double()
    low, high = (numbers << 4) >> 4, numbers >> 4
    return torch.stack([low, high], 2).flatten(1).double()


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize("variant", ["granitemoehybrid", "falcon_h1"])
def test_quantised_networks_compute_with_the_matrices_that_their_numbers_stand_for(
    variant: str, form: str, group: int
) -> None:
    config = config_of(variant)
    found, inputs, meant = stored(variant, form, group)
    assert found
    built = network(config, "bfloat16", quantizations=found)
    dtypes = {name: spec.dtype for name, spec in built.bindings.weights.items() if name in found}
    experts = {name for name in found if "experts" in name}
    assert {dtypes[name] for name in found.keys() - experts} == {form}
    assert {dtypes[name] for name in experts} <= {"fp8" if form == "fp8" else "int8"}
    assert bool(experts) == (variant == "granitemoehybrid")
    logits = evaluated(built, config.program(), config.model.vocab_size, inputs)
    assert worst_error(logits, expected(config, meant.__getitem__)) < CLOSE
    exact = expected(config, checkpoint(variant).tensor)
    assert worst_error(logits, exact) > CLOSE


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize("as_inputs", [False, True])
def test_quantised_networks_build(form: str, group: int, as_inputs: bool, tmp_path: Path) -> None:
    capabilities = (89, 120) if form == "fp8" else (80, 89, 120)
    config = config_of("granitemoehybrid", weights=form, group_size=group or None, compute_capabilities=capabilities)
    read = None if as_inputs else checkpoint("granitemoehybrid").tensor
    asked = request(config, quantizations=quantizations_of(config), read=read)
    builder().build(asked, tmp_path / "engine")


def test_which_matrices_are_quantised() -> None:
    """Those of linear layers and experts: not routers, tied embeddings, norms, nor what is excluded."""
    config = config_of("granitemoehybrid", weights="int8", exclude=("layers.0.*",))
    program = config.program()
    found = quantizations_of(config)
    assert found
    experts = {name for name in found if "experts" in name}
    assert {len(program.weights[name].shape) for name in experts} == {3}
    assert {name.rpartition(".")[2] for name in experts} == {"gate_up", "down"}
    assert all(name.endswith(".weight") and len(program.weights[name].shape) == 2 for name in found.keys() - experts)
    assert not any("router" in name or "embedding" in name or "conv" in name for name in found)
    assert not any(name.startswith("layers.0.") for name in found)
    assert quantizations_of(config_of("granitemoehybrid")) == {}


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_rounding_errs_by_half_a_step(form: str, group: int) -> None:
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0.0
    how = Quantization(form, group)
    tensors, specs = quantized("w", matrix, how, "float32"), quantized_specs("w", (48, 64), how, "float32")
    scales = tensors["w.scale"].double()
    assert tuple(scales.shape) == specs["w.scale"].shape
    assert (scales > 0).all()
    numbers = unpacked(tensors["w"], how)
    assert tuple(numbers.shape) == specs["w"].shape
    wide = scales.reshape(-1, 1) if scales.dim() < 2 else scales.repeat_interleave(64 // scales.shape[1], 1)
    error = (numbers * wide - matrix).abs()
    # FP8 has four significant bits; 4 bits may clip the largest number.
    bound = matrix.abs() / 16 + wide * 2**-10 if form == "fp8" else wide * (0.501 if form == "int8" else 1.5)
    assert (error <= bound).all()
    assert (error[3] == 0).all()


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_experts_are_rounded_as_linear_layers_are(form: str, group: int) -> None:
    """The same numbers and scales, but for the dtype of these and the order of four bits; FP8 has a scale an expert."""
    matrices = (
        torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(2)) * torch.tensor([1.0, 3, 0.1])[:, None, None]
    )
    how = Quantization(form, group)
    tensors, specs = quantized_experts("w", matrices, how), expert_specs("w", (3, 48, 64), how)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {name: spec.shape for name, spec in specs.items()}
    assert tensors["w.scale"].dtype == torch.bfloat16
    assert tensors["w"].dtype == (torch.float8_e4m3fn if form == "fp8" else torch.int8)
    for expert, matrix in enumerate(matrices):
        linear = quantized("w", matrix, how, "bfloat16")
        numbers, scales = unpacked(linear["w"], how), linear["w.scale"].double()
        wide = scales.reshape(-1, 1) if scales.dim() < 2 else scales.repeat_interleave(64 // scales.shape[1], 1)
        found = tensors["w"][expert]
        found = found.double() if form == "fp8" else found
        assert torch.equal(meant_by(found, tensors["w.scale"][expert].double(), 64), numbers * wide)


def test_positive_scales_of_four_bits_err_little_more_than_signed_ones() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    numbers, scales = integers(matrix, 4, 64)
    error = (numbers.double() * scales.double().repeat_interleave(64, 1) - matrix).square().mean()
    assert error < 0.0095  # of numbers of variance 1; signed scales give 0.0088 here


def test_rows_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="w has rows of 48 numbers, which groups of 32 do not divide: choose another"):
        quantized_specs("w", (8, 48), Quantization("int4", 32), "float16")


@pytest.mark.parametrize(
    ("form", "group", "message"), [("int3", 0, "'int3' is not one of"), ("int4", 0, "group_size=0")]
)
def test_unknown_formats_are_refused(form: str, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(form, group)


def test_fp8_on_an_older_gpu_is_refused_when_the_config_is_made() -> None:
    with pytest.raises(ValueError, match="GPUs have FP8 from 89 on"):
        config_of("jamba", weights="fp8", compute_capabilities=(80, 89))


def test_constants_in_the_networks_dtype_are_the_checkpoints_own_memory() -> None:
    """No copy of a weight is made that has the right dtype already."""
    source = torch.zeros(4, 8, dtype=torch.bfloat16)
    (kept,) = StoredWeight("w", TensorSpec((4, 8), "bfloat16")).tensors(source).values()
    assert kept.data_ptr() == source.data_ptr()
