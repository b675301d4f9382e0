"""Transformer blocks that layers share, and the weights of Mamba that are stored in other shapes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model
from engines import make_engine, tiny_engine
from safetensors.torch import load_file, save_file
from test_families import mapped, saved_config

from hybridtrt.build.network import build_program
from hybridtrt.converters.convert import convert
from hybridtrt.converters.describe import describe, render
from hybridtrt.converters.families import family
from hybridtrt.converters.mixers import Mamba1Config, SharedTransformerConfig
from hybridtrt.converters.padding import BlockDiagonal, PadColumns
from hybridtrt.converters.sources import FirstOf, Reshaped, Source


def test_shared_blocks_are_listed_once_and_cached_at_every_use() -> None:
    config = mapped(saved_config("zamba2"))
    names = list(config.weight_table())
    assert len([name for name in names if name.endswith("attention.qkv.weight")]) == 2  # of two blocks
    assert [name for name in names if name.endswith("qkv.adapter_up.weight")] == [
        f"layers.{i}.shared_transformer.attention.qkv.adapter_up.weight" for i in (1, 3, 5)
    ]
    assert [cache.name for cache in config.caches() if cache.name.endswith("kv")] == [
        f"layers.{i}.shared_transformer.attention.kv" for i in (1, 3, 5)
    ]
    used = [
        node.weights["weight"]
        for node in build_program(config).nodes
        if node.name.endswith("shared_transformer.attention.qkv")
    ]
    assert used == [f"shared.{block}.attention.qkv.weight" for block in (0, 1, 0)]
    summary = describe(config)
    shared = [spec for name, spec in config.weight_table().items() if name.startswith("shared.")]
    assert summary.shared_parameters == sum(torch.Size(spec.shape).numel() for spec in shared)
    (row,) = (line for line in render(summary).splitlines() if "shared blocks" in line)
    assert row.split()[-1] == f"{summary.shared_parameters:,}"


def test_uses_of_one_block_must_agree() -> None:
    config = mapped(saved_config("zamba2"))
    *layers, last = config.layers
    first, mamba = last.blocks
    (use,) = first.branches
    assert isinstance(use, SharedTransformerConfig)
    other = replace(first, branches=(replace(use, mlp_adapter_rank=7),))
    with pytest.raises(ValueError, match="layer 5: another layer uses the shared block 0 differently"):
        replace(config, layers=(*layers, replace(last, blocks=(other, mamba))))


@pytest.mark.parametrize(("variant", "owner", "user"), [("zamba", 2, 5), ("zamba2", 1, 5)])
def test_shared_weights_may_lie_under_any_of_their_layers(variant: str, owner: int, user: int, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint(variant), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    before = f"model.layers.{owner}.shared_transf"
    moved = {name.replace(before, f"model.layers.{user}.shared_transf"): tensor for name, tensor in tensors.items()}
    assert moved.keys() != tensors.keys()
    save_file(moved, tmp_path / "model.safetensors", {"format": "pt"})
    assert (make_engine(tmp_path) / "rank0.engine").read_bytes() == (tiny_engine(variant) / "rank0.engine").read_bytes()


@pytest.mark.parametrize("name", ["shared_transf", "adapter_list.2.0", "mamba_decoder.input", "linear.weight"])
def test_a_missing_tensor_of_a_hybrid_layer_is_named(name: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("zamba2"), tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    missing = next(tensor for tensor in sorted(tensors) if name in tensor)
    save_file(
        {k: v for k, v in tensors.items() if k != missing}, tmp_path / "model/model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=f"missing tensor {missing.replace('.', '[.]')}( or | )"):
        convert(tmp_path / "model", tmp_path / "out")


def test_an_embedding_under_its_old_name(tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("mamba"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert (make_engine(tmp_path) / "rank0.engine").read_bytes() == (tiny_engine("mamba") / "rank0.engine").read_bytes()


@torch.no_grad()
def test_heads_of_mamba_are_blocks_of_one_matrix() -> None:
    """x, z, dt, B and C of a token as transformers' mixer of Zamba makes them."""
    config = mapped(saved_config("zamba"))
    (mixer,) = config.layers[0].branches()
    assert isinstance(mixer, Mamba1Config)
    module = tiny_model("zamba").model.layers[0].mamba
    tensors = load_file(tiny_checkpoint("zamba") / "model.safetensors")
    rules = family("zamba").sources(config)

    def weight(name: str) -> torch.Tensor:
        shape = mixer.weights(config.hidden_size)[name].shape
        rule = rules[f"layers.0.mamba1.{name}"]
        assert not isinstance(rule, FirstOf)
        pieces = rule.pieces(tensors.__getitem__)
        return torch.cat([piece.reshape(-1) for piece in pieces]).reshape(shape)

    x = torch.randn(5, config.hidden_size)
    u, z = (x @ weight("in_proj.weight").T).chunk(2, dim=-1)
    theirs = module.in_proj(x).view(5, -1, 2)
    torch.testing.assert_close(torch.stack([u, z], dim=-1), theirs)
    heads = module.x_proj_weight.shape[0]
    parts = torch.einsum("hrc,thc->thr", module.x_proj_weight, u.view(5, heads, -1))
    split = [mixer.dt_rank, mixer.d_state, mixer.d_state]
    expected = torch.cat([part.flatten(1) for part in parts.split(split, dim=-1)], dim=-1)
    torch.testing.assert_close(u @ weight("x_proj.weight").T, expected)
    low = parts[..., : mixer.dt_rank]
    dt = torch.einsum("hcr,thr->thc", module.dt_proj_weight, low).flatten(1)
    torch.testing.assert_close(low.flatten(1) @ weight("dt_proj.weight").T, dt)


def test_transforms() -> None:
    tensors = {"a": torch.arange(1.0, 13.0).reshape(2, 3, 2)}

    def result(source: Source, shape: tuple[int, int]) -> list[list[float]]:
        assert dict(source.tensors(shape)).keys() <= tensors.keys()
        assert all(tuple(tensors[name].shape) == stored for name, stored in source.tensors(shape))
        values: list[list[float]] = (
            torch.cat([p.reshape(-1) for p in source.pieces(tensors.__getitem__)]).view(shape).tolist()
        )
        return values

    assert result(Reshaped("a", (2, 3, 2)), (6, 2)) == tensors["a"].reshape(6, 2).tolist()
    assert result(BlockDiagonal("a", 2, (1, 2)), (6, 4)) == [
        [1, 2, 0, 0], [0, 0, 7, 8], [3, 4, 0, 0], [5, 6, 0, 0], [0, 0, 9, 10], [0, 0, 11, 12]
    ]  # fmt: skip
    tensors = {"b": torch.arange(1.0, 5.0).reshape(2, 2)}
    assert result(PadColumns("b", 1, 2), (2, 5)) == [[0, 1, 2, 0, 0], [0, 3, 4, 0, 0]]
