"""`hybridtrt routing`: transformers' choices on the same windows, overflow counted by hand, and what it prints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import TEXT_VOCAB, text_tokenizer, tiny_model, tiny_text_checkpoint
from engines import LIMITS, tiny_engine, tiny_text_engine
from numpy.typing import NDArray

import hybridtrt.runtime.routing
from hybridtrt.build.build import build
from hybridtrt.cli import main
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.routing import FACTORS, LayerRouting, Routing, route_text
from hybridtrt.runtime.routing_report import render_routing, render_routing_html

FAMILY, MOE_LAYERS = "qwen3_next", 4
TEXT = "It was a text — the kind that a tokenizer cuts anywhere.\nAnd more of it: def f(x): return x + 1\n" * 4


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@torch.inference_mode()
def transformers_choices(context: int) -> list[list[torch.Tensor]]:
    """Experts `[T, k]` of each MoE layer in each window."""
    model = tiny_model(FAMILY, TEXT_VOCAB)
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    found: list[list[torch.Tensor]] = [[] for _ in routers]
    for i, router in enumerate(routers):
        router.register_forward_hook(lambda _module, _args, output, i=i: found[i].append(output[-1]))
    for window in torch.tensor(text_tokenizer(TEXT_VOCAB).encode(TEXT)).split(context):
        if len(window) > 1:
            model(input_ids=window[None], use_cache=False)
    return found


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("context", [16, 64])
def test_counts_what_transformers_chooses(context: int, chunk: int | None, text: Path) -> None:
    routing = route_text(tiny_text_engine(FAMILY), text, context, chunk)
    choices = transformers_choices(context)
    assert len(routing.layers) == len(choices) == MOE_LAYERS
    assert routing.step_tokens == (chunk or context)
    for layer, windows in zip(routing.layers, choices, strict=True):
        experts, k = len(layer.load), windows[0].shape[1]
        assert routing.tokens == sum(map(len, windows))
        assert layer.load == tuple(torch.cat(windows).flatten().bincount(minlength=experts).tolist())
        assert (layer.top_k, layer.skipped, layer.refused) == (k, 0, None)
        for factor, rate in zip(FACTORS, layer.overflow, strict=True):
            lost = 0
            for window in windows:
                for step in window.split(chunk or context):
                    room = math.ceil(factor * len(step) * k / experts)
                    lost += sum(max(count - room, 0) for count in Counter(step.flatten().tolist()).values())
            assert rate == pytest.approx(lost / (routing.tokens * k))


def test_engine_with_a_capacity_says_what_it_refuses(text: Path, tmp_path: Path) -> None:
    """Dropping at factor 1.1 refuses just the overflow of what the routers choose there."""
    checkpoint = tiny_text_checkpoint(FAMILY).with_name(f"{tiny_text_checkpoint(FAMILY).name}-None-checkpoint")
    tiny_text_engine(FAMILY)  # converts it
    build(checkpoint, tmp_path / "engine", replace(LIMITS, moe_capacity_factor=1.1, moe_overflow="next_best"))
    routing = route_text(tmp_path / "engine", text, 64)
    assert any(layer.refused for layer in routing.layers)
    for layer in routing.layers:
        assert layer.refused == layer.overflow[FACTORS.index(1.1)]
    first, free = routing.layers[0], route_text(tiny_text_engine(FAMILY), text, 64).layers[0]
    assert first.load == free.load  # nothing before it was bounded
    assert "refused" in render_routing(routing)


def test_skipped_choices_are_no_experts(text: Path) -> None:
    """zaya's routers may choose none; these choices are in nobody's load."""
    routing = route_text(tiny_text_engine("zaya"), text, 64)
    for layer in routing.layers:
        assert sum(layer.load) + layer.skipped == routing.tokens * layer.top_k
    assert any(layer.skipped for layer in routing.layers)


def layer(*load: int) -> LayerRouting:
    return LayerRouting(3, 2, load, 0, (0.5, 0.4, 0.3, 0.2, 0.1), None)


@pytest.mark.parametrize(
    ("load", "ratio", "unbalanced"),
    [((6, 3, 2), 3.0, False), ((7, 3, 2), 3.5, True), ((1, 0), math.inf, True), ((0, 0), 1.0, False)],
)
def test_balance(load: tuple[int, ...], ratio: float, unbalanced: bool) -> None:
    found = layer(*load)
    routing = Routing(9, 9, 9, (found,))
    assert (found.ratio, found.unbalanced, found.hottest) == (ratio, unbalanced, 0)
    assert bool(routing.warnings) == unbalanced
    data = json.loads(json.dumps(routing.to_dict(), allow_nan=False))["layers"][0]
    assert data["ratio"] == (None if ratio == math.inf else ratio)
    assert [(at["factor"], at["rate"]) for at in data["overflow"]] == list(zip(FACTORS, found.overflow, strict=True))


class Cells(HTMLParser):
    """The opacity and the title of every cell of the heat map, and addresses of other files."""

    def __init__(self) -> None:
        super().__init__()
        self.opacities: list[float] = []
        self.titles: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [str(value) for name, value in values.items() if name in ("src", "href")]
        if tag == "rect":
            self.opacities.append(float(values["fill-opacity"] or "nan"))

    def handle_data(self, data: str) -> None:
        if data.startswith("layer ") and "expert" in data:
            self.titles.append(data)


def test_heat_map() -> None:
    page = Cells()
    page.feed(render_routing_html(Routing(20, 9, 9, (layer(15, 20, 5, 0), layer(0, 40))), "<title> & more"))
    assert page.opacities == pytest.approx([0.5, 2 / 3, 1 / 6, 0.0, 0.0, 2 / 3], abs=1e-3)
    assert page.titles[:2] == ["layer 3, expert 0: 15 tokens, 37.50%", "layer 3, expert 1: 20 tokens, 50.00%"]
    assert page.links == []
    assert "<title> &" not in render_routing_html(Routing(20, 9, 9, (layer(1, 1),)), "<title> & more")


def test_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, page = tiny_text_engine(FAMILY), tmp_path / "page.html"
    text.write_text("a few words", encoding="utf-8")  # too few for all experts
    words = ["routing", str(engine), "--text", str(text), "--context", "64", "--threads", "1"]
    assert main([*words, "--json", "--html", str(page)]) == 0
    done = capsys.readouterr()
    routing = route_text(engine, text, 64)
    assert json.loads(done.out) == json.loads(json.dumps(routing.to_dict()))
    assert done.err == "".join(f"warning: {line}\n" for line in routing.warnings) != ""
    assert page.read_text("utf-8") == render_routing_html(routing, f"Routing of {text} in {engine}")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown == render_routing(routing) + "\n"
    assert len(shown.splitlines()) == 1 + MOE_LAYERS + 1


def test_refuses_what_has_no_routing(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tiny_text_engine("gemma3_text")
    assert main(["routing", str(engine), "--text", str(text)]) == 1
    assert capsys.readouterr().err == f"error: {engine} has no experts\n"
    assert main(["routing", str(tiny_engine(FAMILY)), "--text", str(text)]) == 1
    assert "has no tokenizer" in capsys.readouterr().err
    assert main(["routing", str(tiny_text_engine(FAMILY)), "--text", str(text), "--chunk", "0"]) == 1
    assert "chunk=0 is not in 1..256" in capsys.readouterr().err


def test_refuses_weights_that_are_not_finite(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = hybridtrt.runtime.routing.load_runner

    def broken(*args: object) -> object:
        runner = load(*args)  # type: ignore[arg-type]
        assert isinstance(runner, CpuRunner)
        trace = runner.trace

        def spoilt(batch: StepBatch, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
            return {name: value * np.float32(np.nan) for name, value in trace(batch, names).items()}

        monkeypatch.setattr(runner, "trace", spoilt)
        return runner

    monkeypatch.setattr(hybridtrt.runtime.routing, "load_runner", broken)
    with pytest.raises(ValueError, match="the router of layer 0 gives weights that are not finite"):
        route_text(tiny_text_engine(FAMILY), text)
