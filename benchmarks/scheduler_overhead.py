#!/usr/bin/env python3
"""What the engine adds to a step: scheduling, block tables, sampling's bookkeeping, statistics and text.

The runner returns the same logits each time, so a step is all bookkeeping. Its own time and that of one argmax over
logits of the same shape are taken off, as both belong to the model. Times are CPU time of the engine's thread, so that
other work on the machine does not count. `steady` decodes a fixed set of sequences; in
`turnover` outputs are short and each sequence that ends is replaced by a new one with a prompt of 32 tokens.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from constant_runner import VOCAB, ConstantRunner
from harness import best_seconds, in_turn, parser, report

from hybridtrt.build.stored_tokenizer import StoredTokenizer, TokenizerSettings
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.tokenizer import Tokenizer

PROMPT = 32
TARGETS = {64: 0.3, 512: 1.0}  # ms


class Load:
    """A number of running sequences on an engine, kept up by new requests where outputs are short."""

    def __init__(self, sequences: int, output: int, steps: int, tokenizer: Tokenizer | None) -> None:
        self.runner = ConstantRunner(sequences, PROMPT + output, max_num_tokens=max(4 * sequences, 512))
        self.engine = Engine(self.runner, tokenizer)
        self.steps = steps
        self._output = output
        self._sent = 0
        self._rng = np.random.default_rng(1)
        self.send(sequences)
        while self.engine.statistics()["decode_tokens"] < sequences * min(output // 2, 40):
            self.step()

    def send(self, count: int) -> None:
        """Submit new requests."""
        for _ in range(count):
            prompt = tuple(self._rng.integers(0, VOCAB, PROMPT).tolist())
            # turnover is even from the start: the first outputs end at different times
            tokens = (
                self._output
                if self._sent >= self.engine.info.max_batch_size
                else self._output - self._sent % self._output
            )
            self.engine.submit(Request(str(self._sent), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
            self._sent += 1

    def step(self) -> float:
        """One step; the seconds that are the engine's own."""
        before, started = self.runner.seconds, time.thread_time()
        outputs = self.engine.step()
        own = time.thread_time() - started - (self.runner.seconds - before)
        self.send(sum(output.ends_request for output in outputs))
        return own

    def run(self) -> dict[str, float]:
        """Milliseconds a step."""
        seconds = [self.step() for _ in range(self.steps)]
        logits = np.random.default_rng(2).normal(size=(self.engine.info.max_batch_size, VOCAB)).astype(np.float32)
        argmax = best_seconds(lambda: logits.argmax(1))
        return {
            "own ms": (statistics.median(seconds) - argmax) * 1e3,
            "mean ms": (statistics.fmean(seconds) - argmax) * 1e3,
            "argmax ms": argmax * 1e3,
        }


def main() -> int:
    """Print milliseconds a step by load."""
    one = parser(__doc__)
    one.add_argument("--profile", action="store_true", help="show where the time of a steady step goes, by file")
    args = one.parse_args()
    loads: dict[str, Load] = {}
    for sequences in TARGETS:
        for name, tokenizer in (("", None), (", text", make_tokenizer())):
            steps = 12_800 // sequences
            loads[f"{sequences} steady{name}"] = Load(sequences, 5000, steps, tokenizer)
            loads[f"{sequences} turnover{name}"] = Load(sequences, 64, steps, tokenizer)
    figures = in_turn({name: load.run for name, load in loads.items()}, args.repeats)
    ratios = {
        f"{sequences} running, over {target} ms (at most 1)": figures[f"{sequences} steady"]["own ms"] / target
        for sequences, target in TARGETS.items()
    }
    parts = {f"us a step at {n}": breakdown(loads[f"{n} steady, text"]) for n in TARGETS} if args.profile else {}
    report(args, figures, ratios, **parts)
    return 0


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of the vocabulary's size."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([Path(cProfile.__file__).read_text(encoding="utf-8")] * 2, trainer)
    return Tokenizer(StoredTokenizer(backend, TokenizerSettings()))


def breakdown(load: Load) -> dict[str, float]:
    """Microseconds a step by file, most first, under a profiler that makes small calls dearer than they are."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(load.steps):
        load.step()
    profiler.disable()
    spent: Counter[str] = Counter()
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, _, _), (_, _, own, *_) in stats.items():
        spent[Path(path).name] += own
    return {name: round(seconds / load.steps * 1e6, 1) for name, seconds in spent.most_common(10)}


if __name__ == "__main__":
    sys.exit(main())
