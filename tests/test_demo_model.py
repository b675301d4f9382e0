"""The demo models: how their text is read, how they are trained, and what the committed ones are worth."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import TINY

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted(path.parent for path in ROOT.glob("models/*/config.json"))
HELD_OUT = "held_out.txt"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of `scripts/demo`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from demo import gated_delta, models, text, training

    return SimpleNamespace(gated_delta=gated_delta, models=models, text=text, training=training)


@pytest.fixture
def quality_table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import quality_table

    return quality_table


def character_vector(strings: list[str], version: int) -> bytes:
    """As R's `serialize` writes it."""
    head = b"X\n" + struct.pack(">iii", version, 0x040201, 0x030500 if version == 3 else 0x020300)
    if version == 3:
        head += struct.pack(">i", 5) + b"UTF-8"
    items = b"".join(struct.pack(">ii", 0x40009, len(text.encode())) + text.encode() for text in strings)
    return head + struct.pack(">ii", 16, len(strings)) + items


@pytest.mark.parametrize("version", [2, 3])
def test_reads_the_database_of_an_r_package(version: int, demo: SimpleNamespace) -> None:
    vectors = [["one", "", "two £"], [""], ["three"] * 40]
    items = [character_vector(strings, version) for strings in vectors]
    data = b"".join(struct.pack(">I", len(item)) + zlib.compress(item) for item in items)
    assert [list(demo.text._strings(item)) for item in demo.text._objects(data)] == vectors


def test_keeps_the_prose_of_a_novel(demo: SimpleNamespace) -> None:
    lines = [
        "EMMA",
        "",
        "By Jane Austen",
        "",
        "(1815)",
        "",
        "VOLUME I",
        "",
        "CHAPTER I",
        "",
        "It was",
        "_so_  fine.",
        "",
    ]
    lines += [
        '"Yes."',
        "",
        "Chapter 2",
        "",
        "She left.",
        "",
        "THE END",
        "",
        "Thoroughly revised, then",
        "thoroughly revised.",
    ]
    end = demo.text.END
    assert demo.text.clean(lines) == f'It was so fine.\n"Yes."\n{end}\nShe left.\n{end}\n'


def test_every_paragraph_is_trained_on_or_held_out(demo: SimpleNamespace) -> None:
    line = "A paragraph of {} and more words, which go on for a while.\n"
    texts = ["".join(line.format(f"{name}{i}") for i in range(9000)) for name in "ab"]
    kept, held = demo.text.split(texts)
    assert sorted((kept + held).splitlines()) == sorted("".join(texts).splitlines())
    assert not set(kept.splitlines()) & set(held.splitlines())
    assert 0.02 < len(held) / len(kept) < 0.05


def test_refuses_another_package(demo: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / f"{demo.text.PACKAGE}_{demo.text.VERSION}_all.deb"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="has sha256"):
        demo.text.fetch(tmp_path)


@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_the_rule_for_training_is_that_of_transformers(heads: tuple[int, int], demo: SimpleNamespace) -> None:
    torch.manual_seed(0)
    chunk = demo.gated_delta.CHUNK
    qk, v = (2, 2 * chunk, heads[0], 16), (2, 2 * chunk, heads[1], 8)
    inputs = [torch.randn(qk), torch.randn(qk), torch.randn(v), -torch.rand(v[:3]), torch.rand(v[:3])]
    weight = torch.randn(v)
    found: list[list[torch.Tensor]] = []
    original = demo.gated_delta.modeling_qwen3_next.torch_chunk_gated_delta_rule
    for rule in (original, demo.gated_delta.gated_delta):
        leaves = [value.clone().requires_grad_() for value in inputs]
        query, key, value, g, beta = leaves
        output, _ = rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        (output * weight).sum().backward()
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_inverse_is_exact_for_keys_that_are_all_alike(demo: SimpleNamespace) -> None:
    lower = torch.ones(64, 64).tril(-1)
    inverse = demo.gated_delta.UnitInverse.apply(lower)
    assert torch.equal(inverse, torch.eye(64) - torch.eye(64).roll(-1, 1).tril(-1))


def test_a_pass_takes_every_window_once(demo: SimpleNamespace) -> None:
    context = demo.models.CONTEXT
    tokens = torch.arange(20 * context + 7)
    windows = (len(tokens) - context - 1) // context
    for first in (0, windows):
        rows = torch.cat([demo.training.batch(tokens, step, 1) for step in range(first, first + windows)])
        starts = sorted(int(row[0]) for row in rows)
        assert all(later - earlier == context for earlier, later in pairwise(starts))
        assert torch.equal(rows[:, 1:] - rows[:, :-1], torch.ones(windows, context, dtype=torch.int64))
    both = demo.training.batch(tokens, 0, 2)
    assert torch.equal(both, torch.cat([demo.training.batch(tokens, step, 1) for step in range(2)]))


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    demo: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Qwen3NextConfig(**TINY["qwen3_next"])
    recipe = replace(next(iter(demo.models.recipes().values())), config=config, steps=3, batch=2)
    tokens = torch.randint(96, (2000,), generator=torch.Generator().manual_seed(0))

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    whole, parts = model(), model()
    assert demo.training.train(whole, recipe, tokens, tokens, tmp_path / "whole.pt", demo.training.Limits())
    hurried = demo.training.Limits(seconds=0)
    for _ in range(2):
        assert not demo.training.train(parts, recipe, tokens, tokens, tmp_path / "parts.pt", hurried)
    parts = model()
    assert demo.training.train(parts, recipe, tokens, tokens, tmp_path / "parts.pt", hurried)
    for (name, expected), found in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        assert torch.equal(expected, found), name
    assert "going on after step 2" in capsys.readouterr().err


def test_the_rate_warms_up_and_falls(demo: SimpleNamespace) -> None:
    rates = [demo.training.rate(step, 1000) for step in range(1000)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(demo.training.LAST_RATE, abs=1e-3)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 6 KB of what the models were not trained on."""
    path = tmp_path_factory.mktemp("demo") / "text.txt"
    path.write_bytes((MODELS[0] / HELD_OUT).read_bytes()[:6000].rpartition(b"\n")[0])
    return path


@pytest.mark.skipif(not MODELS, reason="no demo model is committed")
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_committed_model_reads_english_however_it_is_stored(
    model: Path, short_text: Path, quality_table: ModuleType, demo: SimpleNamespace
) -> None:
    assert sum(path.stat().st_size for path in model.iterdir()) < 12e6
    page = (model / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"Held-out perplexity, .*: ([\d.]+) a token", page)
    assert stated
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokens = torch.tensor(tokenizer.encode(short_text.read_text(encoding="utf-8")))
    expected = demo.training.perplexity(oracle, tokens)
    assert expected == pytest.approx(float(stated[1]), rel=0.2)  # another part of the text, not another model
    rows = {row.stored: row for row in quality_table.measure(model, short_text, demo.models.CONTEXT)}
    assert rows["float32 weights"].perplexity == pytest.approx(expected, rel=1e-3)
    for name, most in (("bfloat16 weights", 0.005), ("int8 weights", 0.01), ("int4 weights, groups of 32", 0.1)):
        assert abs(rows[name].change) < most, name
    for name in ("bfloat16 states", "bfloat16 KV"):
        assert abs(rows[name].change) < 0.01, name
