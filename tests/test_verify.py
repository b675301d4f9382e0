"""`verify`: equal engines pass, and for a wrong one it says which layer departs first."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from engines import make_engine, relative_error, tiny_engine
from safetensors.torch import load_file, save_file

from hybridtrt.build.engine import BuildConfig
from hybridtrt.build.network import build_program
from hybridtrt.cli import main
from hybridtrt.converters.families import families
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.runtime.layer_trace import oracle_stream, our_stream, stream_names
from hybridtrt.runtime.load import load_runner
from hybridtrt.runtime.runner import TracingRunner
from hybridtrt.runtime.verify import verify

VARIANTS = sorted(name for name in checkpoints.TINY if checkpoints.model_type(name) in families())
VOID = {"meta"}


class Balanced(HTMLParser):
    """Checks that every element is closed and that nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stream_after_every_layer(variant: str) -> None:
    model, runner = checkpoints.tiny_model(variant), load_runner(tiny_engine(variant))
    assert isinstance(runner, TracingRunner)
    ids = np.random.default_rng(1).integers(0, 96, 37).tolist()
    count = len(read_model_config(checkpoints.tiny_checkpoint(variant)).layers)
    ours, theirs = our_stream(runner, ids), oracle_stream(model, ids, count)
    assert len(ours) == len(theirs) == count + 1
    for values, expected in zip(ours, theirs, strict=True):
        assert relative_error(values, expected) < 1e-4
    again = oracle_stream(model, ids, count)  # the hooks of the first time are gone
    assert len(again) == count + 1


def test_names_of_the_stream() -> None:
    program = build_program(read_model_config(checkpoints.tiny_checkpoint("granitemoehybrid")))
    assert stream_names(program) == ["embedding_scaled", *(f"layers.{i}.moe.residual" for i in range(3))]


def test_a_trace_in_several_steps_is_the_same() -> None:
    short = make_engine(
        checkpoints.tiny_checkpoint("jamba"), BuildConfig(max_num_tokens=16, max_seq_len=64), dtype="float32"
    )
    ids = list(range(50))
    for one, other in zip(
        *(our_stream(load_runner(engine), ids) for engine in (tiny_engine("jamba"), short)),  # type: ignore[arg-type]
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_an_equal_engine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.tiny_checkpoint("qwen3_next")
    page = tmp_path / "report.html"
    arguments = ["verify", str(folder), str(tiny_engine("qwen3_next"))]
    assert main([*arguments, "--report", str(page)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^No layer departs: \S+ at most\.\npassed: ", shown.out, re.MULTILINE)
    assert "verify: prompt of 65 tokens, 5 of 6" in shown.err
    parser = Balanced()
    parser.feed(page.read_text())
    assert parser.open == []
    assert page.read_text().count("<rect") == 5
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is True
    assert data["first_departure"] is None
    assert [layer["layer"] for layer in data["layers"]] == ["embedding", "0", "1", "2", "3"]
    assert data["layers"][4]["mixer"] == "attention"
    assert all(layer["error"] < 1e-4 for layer in data["layers"])


@pytest.mark.parametrize("family", sorted({"qwen3_5", "zaya"} & set(families())))
def test_models_that_transformers_must_be_helped_to_load(family: str) -> None:
    """A wrapper whose text model alone would be untied, and buffers that are initialised after they were loaded."""
    report = verify(checkpoints.tiny_checkpoint(family), tiny_engine(family))
    assert report.passed
    assert report.first_departure is None


def test_an_oracle_with_random_weights_is_none(tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints.tiny_checkpoint("jamba"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"transformers finds no tensor for lm_head\.weight"):
        verify(folder, tiny_engine("jamba"))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The tiny jamba with a factor on one weight of layer 2."""
    shutil.copytree(checkpoints.tiny_checkpoint("jamba"), tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["model.layers.2.mamba.D"].mul_(1.5)
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model"


def test_it_names_the_layer_that_departs_first(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, page = make_engine(damaged), damaged / "report.html"
    arguments = ["verify", str(checkpoints.tiny_checkpoint("jamba")), str(engine), "--report", str(page)]
    assert main(arguments) == 1
    assert "Layer 2 (mamba1, mlp) is the first to depart" in capsys.readouterr().out
    text = page.read_text()
    assert "first departs: 2" in text
    assert text.count('<rect class="bad"') == 2
    assert text.count('<rect class="good"') == 3


def test_values_that_are_not_finite(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(1e38)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    report = verify(checkpoints.tiny_checkpoint("jamba"), make_engine(damaged))
    assert report.first_departure is not None
    assert report.first_departure.layer == "1"
    assert not report.passed
    assert report.to_dict()["layers"][-1]["error"] is None
    assert "not finite" in report.departure()


def test_engine_of_another_model_and_engine_without_room(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 96 tokens, .* has 384"):
        verify(
            checkpoints.tiny_checkpoint("jamba"),
            make_engine(checkpoints.tiny_text_checkpoint("jamba")),
        )
    folder = checkpoints.save(checkpoints.tiny_model("jamba"), tmp_path / "model")
    with pytest.raises(ValueError, match="max_seq_len=1 leaves no room"):
        verify(folder, make_engine(folder, BuildConfig(max_seq_len=1)))
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        verify(tmp_path, tiny_engine("jamba"))


def test_a_model_without_such_a_list_of_layers() -> None:
    with pytest.raises(ValueError, match="Linear has no list of 3 layers"):
        oracle_stream(torch.nn.Linear(2, 2), [1], 3)
