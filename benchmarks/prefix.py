#!/usr/bin/env python3
"""Time to first token of prompts that begin with the same 1,000 tokens, with that prefix in the cache and without.

Each question is asked twice, once under a salt of its own, which shares nothing, and once under a common salt, under
which other questions came before. Both must get the same tokens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import numpy as np
from harness import parser, random_engine, report, timer

from hybridtrt.build.engine import BuildConfig
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Request, SamplingParams

LIMITS = BuildConfig(max_batch_size=8, max_num_tokens=512, max_seq_len=2048)
PREFIX, QUESTION, ANSWER = 1000, 24, 8
BEFORE = 3  # questions that make the prefix known as a shared one


def main() -> int:
    """Print both times and their ratio. Status 1 if an answer depends on the cache."""
    one = parser(__doc__)
    one.set_defaults(repeats=9)
    args = one.parse_args()
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"cold": [], "hot": []}
    different, now = 0, timer(args.threads)
    with random_engine(LIMITS) as engine_dir:
        engine = Engine(load_runner(engine_dir, RuntimeOptions(threads=args.threads)))
        prefix = rng.integers(0, engine.info.vocab_size, PREFIX).tolist()
        questions = rng.integers(0, engine.info.vocab_size, (BEFORE + args.repeats, QUESTION)).tolist()
        for question in questions[:BEFORE]:
            ask(engine, [*prefix, *question], "common", now)
        for i, question in enumerate(questions[BEFORE:]):
            cold, expected = ask(engine, [*prefix, *question], f"own {i}", now)
            hot, answer = ask(engine, [*prefix, *question], "common", now)
            times["cold"].append(cold)
            times["hot"].append(hot)
            different += answer != expected
        hits = engine.statistics()["hit_tokens"]
        engine.close()
    figures = {
        kind: {"first token ms": statistics.median(found) * 1e3, "best ms": min(found) * 1e3}
        for kind, found in times.items()
    }
    ratio = figures["hot"]["first token ms"] / figures["cold"]["first token ms"]
    report(
        args,
        figures,
        {"first token, hot over cold (at most 0.15)": ratio},
        tokens_found_in_the_cache=hits,
        answers_that_differ=different,
    )
    return 1 if different else 0


def ask(engine: Engine, prompt: list[int], salt: str, now: Callable[[], float]) -> tuple[float, tuple[int, ...]]:
    """Seconds to the first token, and the answer."""
    engine.submit(Request("question", tuple(prompt), SamplingParams(max_tokens=ANSWER), cache_salt=salt))
    started, first, answer = now(), 0.0, list[int]()
    while engine.has_work:
        for output in engine.step():
            first = first or now() - started
            answer += output.token_ids
    return first, tuple(answer)


if __name__ == "__main__":
    sys.exit(main())
