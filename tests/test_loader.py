"""What real checkpoints do and a plain one does not: saved without a head, damaged values, no padding token."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, model_type, random_model, tiny_checkpoint
from safetensors.torch import load_file, save_file

from hybridtrt.converters.convert import convert, dry_run
from hybridtrt.converters.families import families
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.model_reader import read_model_config

TIED = sorted(name for name in ("granitemoehybrid", "jamba", "qwen3_next", "lfm2", "mamba") if name in families())


def copied(variant: str, folder: Path, form: str = "hub") -> Path:
    return Path(shutil.copytree(tiny_checkpoint(variant, form), folder / "model"))


@pytest.mark.parametrize("variant", TIED)
def test_a_base_model(variant: str, tmp_path: Path) -> None:
    """Saved by transformers without the head, so without the prefix of the whole model."""
    model = random_model(variant, TINY[variant] | {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    names = {tensor for origin in dry_run(tmp_path / "base")[1] for tensor in origin.tensors}
    assert not names & set(load_file(tmp_path / "base/model.safetensors"))
    for folder in ("whole", "base"):
        convert(tmp_path / folder, tmp_path / f"{folder}-out")
    assert (tmp_path / "whole-out/rank0.safetensors").read_bytes() == (
        tmp_path / "base-out/rank0.safetensors"
    ).read_bytes()


def test_a_base_model_whose_head_is_needed(tmp_path: Path) -> None:
    folder = copied("jamba", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensor lm_head\.weight "):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 77, -1])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype, place: int, tmp_path: Path) -> None:
    folder = copied("jamba", tmp_path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    name = "model.layers.0.mamba.x_proj.weight"
    tensors[name].view(-1)[place] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = rf"model\.safetensors: {re.escape(name)} holds values that are NaN or infinite$"
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("variant", sorted(set(map(model_type, TINY)) & set(families()) & set(TINY)))
def test_padding_token_of_minus_one_means_none(variant: str, tmp_path: Path) -> None:
    folder = copied(variant, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    for place in (values, values.get("text_config", {})):
        if "pad_token_id" in place:
            place["pad_token_id"] = -1
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_model_config(folder).pad_token_id is None
    with pytest.raises(ValueError, match="pad_token_id=-2"):
        HFConfig({"pad_token_id": -2}).token_id("pad_token_id", vocab_size=9)
    with pytest.raises(ValueError, match="bos_token_id=-1"):
        HFConfig({"bos_token_id": -1}).token_id("bos_token_id", vocab_size=9)
