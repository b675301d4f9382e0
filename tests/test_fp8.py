"""FP8 checkpoints: what is converted is exactly the product of matrix and scale; every other method is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridtrt.converters.checkpoint import load_checkpoint
from hybridtrt.converters.convert import convert, dry_run
from hybridtrt.converters.fp8 import Fp8Reader
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.model_reader import read_model
from hybridtrt.converters.quantization import Fp8Config, read_quantization

Tensors = dict[str, torch.Tensor]
BLOCK = (16, 24)  # divides no matrix of the tiny model
KEPT = ("embed", "lm_head", "norm", "conv1d", "A_log", "dt_proj", ".D", "router", "gate.weight")


def quantize(weight: torch.Tensor, block: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and their scales, block by block."""
    rows, columns = block or weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
    return values, scale if block else scale.reshape(())


def dequantize(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    rows, columns = block or values.shape
    result = torch.empty(values.shape)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            result[i, j] = values[i, j].float() * (scale[i // rows, j // columns] if block else scale)
    return result


def fp8_folder(folder: Path, block: tuple[int, int] | None, ending: str = "_scale_inv") -> tuple[Path, Path]:
    """The tiny model in FP8, and the same values in float32."""
    plain, quantized = folder / "plain", folder / "fp8"
    for target in (plain, quantized):
        shutil.copytree(tiny_checkpoint("qwen3_next"), target)
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    for name, weight in tensors.items():
        if weight.ndim != 2 or any(part in name for part in KEPT):
            stored[name] = weight
            continue
        stored[name], stored[name + ending] = quantize(weight, block)
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(())
        tensors[name] = dequantize(stored[name], stored[name + ending], block)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    describe(quantized, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block and list(block)})
    return plain, quantized


def describe(folder: Path, quantization: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    changed = load_file(path) | tensors
    save_file({k: v for k, v in changed.items() if v is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("block", [BLOCK, None])
def test_conversion_equals_that_of_the_products(block: tuple[int, int] | None, ending: str, tmp_path: Path) -> None:
    plain, quantized = fp8_folder(tmp_path, block, ending)
    for dtype in ("float32", "bfloat16"):
        convert(plain, tmp_path / "a", dtype)
        convert(quantized, tmp_path / "b", dtype)
        for file in ("rank0.safetensors", "config.json"):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    load_checkpoint(tmp_path / "b")
    _, origins = dry_run(quantized)
    assert not [name for origin in origins for name in origin.tensors if "scale" in name]


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), block=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    batch=st.sampled_from([None, 1, 3]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_shape_and_block(
    rows: int, columns: int, block: tuple[int, int], batch: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fp8")
    pairs = [quantize(torch.randn(rows, columns), block) for _ in range(batch or 1)]
    expected = torch.stack([dequantize(*pair, block) for pair in pairs])
    values, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    if batch is None:
        values, scales, expected = values[0], scales[0], expected[0]
    save_file({"x": values, "x_scale_inv": scales, "y": torch.ones(1)}, folder / "model.safetensors")
    reader = Fp8Reader(folder, Fp8Config(block))
    assert reader.names == {"x", "y"}
    assert torch.equal(reader.read("x"), expected)


def test_damaged_scales(tmp_path: Path) -> None:
    _, quantized = fp8_folder(tmp_path, BLOCK)
    name = "model.layers.3.self_attn.q_proj.weight"
    good = load_file(quantized / "model.safetensors")
    scale = good[f"{name}_scale_inv"]
    cases = {
        r"has dtype F8_E4M3 and 0 scales, expected \S+_scale_inv or": {f"{name}_scale_inv": None},
        "has dtype F8_E4M3 and 2 scales": {f"{name}_scale": scale},
        r"has shape \[\d+, \d+\], expected \[8, 2\] for \[128, 32\] in blocks of \[16, 24\]": {
            f"{name}_scale_inv": scale.T.contiguous()
        },
        "has dtype F8_E4M3, expected": {f"{name}_scale_inv": scale.to(torch.float8_e4m3fn)},
        rf"{re.escape(name)} holds values that are NaN": {f"{name}_scale_inv": scale * float("inf")},
    }
    for message, changes in cases.items():
        save_file(good, quantized / "model.safetensors", metadata={"format": "pt"})
        change(quantized, **changes)
        with pytest.raises(ValueError, match=message):
            convert(quantized, tmp_path / "out")
    save_file(good, quantized / "model.safetensors", metadata={"format": "pt"})
    describe(quantized, {"quant_method": "fp8"})
    with pytest.raises(ValueError, match="expected one number"):
        convert(quantized, tmp_path / "out")
    describe(quantized, None)
    with pytest.raises(ValueError, match=r"surplus tensor|has dtype F8_E4M3"):
        convert(quantized, tmp_path / "out")


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "modelopt", "fbgemm_fp8", None, 8, {}]
)
def test_other_methods_are_refused_by_name(method: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("jamba"), tmp_path / "model")
    describe(tmp_path / "model", {"quant_method": method, "bits": 4})
    with pytest.raises(ValueError, match=re.escape(f"quant_method={method!r} is not supported")) as error:
        read_model(tmp_path / "model")
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    "values",
    [{"fmt": "e5m2"}, {"fmt": None}, {"weight_block_size": [128]}, {"weight_block_size": [0, 1]},
     {"weight_block_size": "128"}, {"weight_block_size": [1.5, 2]}],
)  # fmt: skip
def test_bad_values(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        read_quantization(HFConfig({"quantization_config": {"quant_method": "fp8", **values}}))


def test_no_quantization() -> None:
    assert read_quantization(HFConfig({})) is None
    assert read_quantization(HFConfig({"quantization_config": None})) is None
    with pytest.raises(ValueError, match="quantization_config"):
        read_quantization(HFConfig({"quantization_config": "fp8"}))
    with pytest.raises(ValueError, match="quant_method=None"):
        read_quantization(HFConfig({"quantization_config": {}}))
