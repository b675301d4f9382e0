"""`convert --dry-run`: the layer table and the source of every weight, without writing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import FAMILIES, FORMS, TINY, model_type, tiny_checkpoint

from hybridtrt.cli import main
from hybridtrt.converters.checkpoint import weight_layouts
from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.convert import convert, dry_run
from hybridtrt.converters.families import families
from hybridtrt.converters.origins import transform
from hybridtrt.converters.sources import AddOne, Concat, Deinterleave, DropAxis, Named, Stack


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_describes_what_a_conversion_writes(family: str, form: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, form)
    config, origins = dry_run(folder, "bfloat16")
    assert config == convert(folder, tmp_path / "out", "bfloat16")
    layouts = {origin.name: (origin.shape, origin.dtype) for origin in origins}
    assert layouts == {name: (layout.shape, layout.dtype) for name, layout in weight_layouts(config).items()}
    used = {tensor for origin in origins for tensor in origin.tensors}
    assert used == CheckpointReader(folder).names


@pytest.mark.parametrize("variant", sorted(name for name in TINY if model_type(name) in families()))
def test_every_tensor_of_every_family_has_a_place(variant: str) -> None:
    _, origins = dry_run(tiny_checkpoint(variant))
    used = {tensor for origin in origins for tensor in origin.tensors}
    assert used <= CheckpointReader(tiny_checkpoint(variant)).names
    assert all(origin.transform for origin in origins)


def test_transforms_as_text() -> None:
    assert transform(Named("a")) == "a"
    assert transform(AddOne("a")) == "add_one(a)"
    assert transform(DropAxis("a")) == "drop_axis(a)"
    assert transform(Deinterleave("a", 2, (3, 4))) == "deinterleave(a, groups=2, sizes=[3, 4])"
    assert transform(Concat((Named("a"), AddOne("b")), rows=(6, 1))) == "concat(a, add_one(b), rows=[6, 1])"
    many = Stack(tuple(Concat((Named(f"{i}.a"), Named(f"{i}.b"))) for i in range(512)))
    assert transform(many) == "stack(concat(0.a, 0.b), … 510 more …, concat(511.a, 511.b))"


def test_command_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint("qwen3_next")
    assert main(["convert", str(folder), "--dry-run", "-o", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +3 +attention +moe", text, re.MULTILINE)
    assert "layers.0.gated_delta.pre_norm.weight [32] float32 <- add_one(model.layers.0.input_layernorm.weight)" in text
    assert main(["convert", str(folder), "--dry-run", "--json", "--dtype", "float16"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["layers"]) == 4
    assert data["weights"][0] == {
        "name": "embedding.weight",
        "shape": [96, 32],
        "dtype": "float16",
        "transform": "model.embed_tokens.weight",
        "tensors": ["model.embed_tokens.weight"],
    }
    assert main(["convert", str(folder)]) == 1
    assert "nowhere to write to" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nothing"), "--dry-run"]) == 1
    assert list(tmp_path.iterdir()) == []
