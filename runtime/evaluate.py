"""Perplexity of a text under an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.forward import prefill_steps
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.text_windows import Progress, cut_windows, read_tokens


@dataclass(frozen=True)
class Evaluation:
    """What a text costs under an engine.

    `tokens` are all of the text, `scored` those after the first of a window of `context` tokens; `bits_per_byte` counts
    the others as the scored ones on average.
    """

    tokens: int
    scored: int
    context: int
    log_loss: float  # nats a scored token
    perplexity: float
    bits_per_byte: float


def evaluate(
    engine_dir: str | Path,
    text: str | Path,
    context: int | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    progress: Progress = lambda windows: nullcontext(lambda: None),
) -> Evaluation:
    """Score the text of a file in windows of `context` tokens, each by itself; by default the engine's longest.

    A step takes `chunk` tokens, by default as many as it can. With 1 all is read from the caches, as in decoding: what
    storing those in less than float32 costs shows then. `progress` gets the number of windows and gives a function that
    is called after each.

    Raises:
        ValueError: the file is no text, or too short; the engine is no good, or has no tokenizer.
    """
    ids, num_bytes = read_tokens(engine_dir, text)
    runner = load_runner(engine_dir, RuntimeOptions(threads=threads, enable_block_reuse=False))
    try:
        context, windows = cut_windows(runner.info, ids, context, chunk)
        total = 0.0
        with progress(len(windows)) as advance:
            for i, window in enumerate(windows):
                loss = window_loss(runner, window, chunk)
                if not math.isfinite(loss):
                    raise ValueError(f"the logits of window {i} (tokens {i * context}...) are not finite")
                total += loss
                advance()
    finally:
        runner.close()
    scored = sum(len(window) - 1 for window in windows)
    mean = total / scored
    bits = mean / math.log(2) * len(ids) / num_bytes
    return Evaluation(len(ids), scored, context, mean, math.exp(mean), bits)


def window_loss(runner: Runner, ids: Sequence[int], chunk: int | None = None) -> float:
    """Sum of -log p of every token after the first. Uses slot 1 and the first pages of an idle runner."""
    runner.clear_slots([1])
    total = 0.0
    for batch in prefill_steps(runner.info, ids[:-1], chunk):
        start = int(batch.context_lens[0])
        total += _log_losses(runner.step(batch), ids[start + 1 : start + 1 + batch.num_tokens])
    return total


def _log_losses(logits: NDArray[np.float32], targets: Sequence[int]) -> float:
    """Sum of -log softmax at the targets; overwrites the logits `[len(targets), vocab_size]`."""
    logits -= logits.max(-1, keepdims=True)
    chosen = logits[np.arange(len(targets)), list(targets)].astype(np.float64)
    return float((np.log(np.exp(logits, out=logits).sum(-1, dtype=np.float64)) - chosen).sum())
