"""`hybridtrt eval`: transformers' loss on the same windows, whatever the steps, and one line for what is wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import TEXT_VOCAB, text_tokenizer, tiny_model, tiny_text_checkpoint
from engines import LIMITS, make_engine, tiny_engine, tiny_text_engine
from numpy.typing import NDArray

import hybridtrt.runtime.evaluate
from hybridtrt.cli import main
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.evaluate import evaluate

FAMILY = "qwen3_next"
TEXT = "It was a text — the kind that a tokenizer cuts anywhere.\nAnd more of it: def f(x): return x + 1\n" * 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@torch.inference_mode()
def transformers_losses(context: int) -> tuple[float, int, int]:
    """Sum of transformers' loss over the windows, tokens scored and tokens in all."""
    ids = text_tokenizer(TEXT_VOCAB).encode(TEXT)
    model, total, count = tiny_model(FAMILY, TEXT_VOCAB), 0.0, 0
    for window in torch.tensor(ids).split(context):
        if len(window) > 1:
            loss = model(input_ids=window[None], labels=window[None], use_cache=False).loss
            total += float(loss) * (len(window) - 1)
            count += len(window) - 1
    return total, count, len(ids)


@pytest.mark.parametrize("context", [2, 7, 64, 65, 256])
def test_equals_the_loss_of_transformers(context: int, text: Path) -> None:
    result = evaluate(tiny_text_engine(FAMILY), text, context)
    total, scored, tokens = transformers_losses(context)
    assert (result.tokens, result.scored, result.context) == (tokens, scored, context)
    assert result.log_loss == pytest.approx(total / scored, rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(total / scored), rel=1e-3)
    bits = total / scored * tokens / math.log(2) / len(TEXT.encode())
    assert result.bits_per_byte == pytest.approx(bits, rel=1e-4)


def test_does_not_depend_on_the_tokens_of_a_step(text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_text_checkpoint(FAMILY), model)
    limits = {"max_num_tokens": 10, "max_batch_size": 1}
    small = make_engine(model, type(LIMITS)(**(LIMITS.__dict__ | limits)))
    assert evaluate(small, text, 64).log_loss == pytest.approx(
        evaluate(tiny_text_engine(FAMILY), text, 64).log_loss, rel=1e-5
    )


@pytest.mark.parametrize("chunk", [1, 5, 63])
def test_does_not_depend_on_the_chunk(chunk: int, text: Path) -> None:
    engine = tiny_text_engine(FAMILY)
    assert evaluate(engine, text, 64, chunk).log_loss == pytest.approx(evaluate(engine, text, 64).log_loss, rel=1e-5)


def test_command(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tiny_text_engine(FAMILY)
    assert main(["eval", str(engine), "--text", str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["context"] == LIMITS.max_seq_len
    assert found["perplexity"] == pytest.approx(math.exp(found["log_loss"]))
    assert main(["eval", str(engine), "--text", str(text), "--context", "32", "--threads", "1"]) == 0
    assert capsys.readouterr().out.startswith("perplexity ")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b"\xff\xfe\xfd abc", "not valid UTF-8"), (b"a", "has 1 token")],
)
def test_refuses_what_cannot_be_scored(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    assert main(["eval", str(tiny_text_engine(FAMILY)), "--text", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("context", [-1, 0, 1, 257])
def test_refuses_a_window_that_the_engine_has_not(context: int, text: Path) -> None:
    with pytest.raises(ValueError, match=rf"context={context} is not in 2\.\.256"):
        evaluate(tiny_text_engine(FAMILY), text, context)


@pytest.mark.parametrize("chunk", [-1, 0, 257])
def test_refuses_a_chunk_that_is_no_step(chunk: int, text: Path) -> None:
    with pytest.raises(ValueError, match=rf"chunk={chunk} is not in 1\.\.256"):
        evaluate(tiny_text_engine(FAMILY), text, chunk=chunk)


def test_refuses_an_engine_without_tokenizer(text: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        evaluate(tiny_engine(FAMILY), text)


def test_refuses_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tiny_text_engine(FAMILY)), "--text", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err


def test_says_where_logits_are_not_finite(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, steps = hybridtrt.runtime.evaluate.load_runner, []

    def broken(*args: object) -> object:
        runner = load(*args)  # type: ignore[arg-type]
        step = runner.step

        def nan(batch: StepBatch) -> NDArray[np.float32]:
            steps.append(batch)
            return step(batch) * (np.nan if len(steps) == 3 else 1)

        runner.step = nan  # type: ignore[method-assign]
        return runner

    monkeypatch.setattr(hybridtrt.runtime.evaluate, "load_runner", broken)
    with pytest.raises(ValueError, match=r"window 2 \(tokens 32\.\.\.\) are not finite"):
        evaluate(tiny_text_engine(FAMILY), text, 16)
