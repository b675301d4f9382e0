#!/usr/bin/env python3
"""Sampling of a step's rows, in C++ and in numpy: how much later the next step begins.

Logits are normal numbers times `--spread`: with 1 nearly every token counts, from about 4 on they lie as far apart as a
trained model's. A call gets other rows than the one before, so that it finds nothing of them in the branch predictor.
Both forms run in turn on the same rows, in one thread, and time is CPU time. HYBRIDTRT_ISA names the instruction set.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from harness import in_turn, parser, report, timer
from numpy.typing import NDArray

from hybridtrt.plugins.sample import Sampled, SampleParams, native, vectorized
from hybridtrt.plugins.sample.reference import greedy

Form = Callable[[NDArray[np.float32], SampleParams], Sampled]

VOCABS, ROWS = (32_000, 151_936), (1, 8)
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.1": {"min_p": 0.1},
}
COPIES, CALLS = 8, 5  # different rows, and calls with each in a run


def main() -> int:
    """Print microseconds a call by vocabulary, rows and kind."""
    one = parser(__doc__)
    one.add_argument("--spread", type=float, default=4, help="standard deviation of the logits (%(default)s)")
    args = one.parse_args()
    rng, figures, different = np.random.default_rng(0), {}, 0
    for vocab in VOCABS:
        for rows in ROWS:
            logits = rng.standard_normal((COPIES, rows, vocab), np.float32) * np.float32(args.spread)
            for kind, limits in KINDS.items():
                params = make_params(rows, limits)
                forms: dict[str, Form] = {
                    "numpy": vectorized.sample if params.temperature.any() else lambda logits, _: greedy(logits),
                    "C++": native.sample,
                }
                both = {name: partial(microseconds, form, logits, params) for name, form in forms.items()}
                found = in_turn(both, args.repeats)
                us = {f"{name} us": found[name]["us"] for name in forms}
                figures[f"{vocab}, {rows} rows, {kind}"] = {**us, "C++ / numpy": us["C++ us"] / us["numpy us"]}
                for some in logits:
                    tokens = [form(some, params).tokens for form in forms.values()]
                    different += int((tokens[0] != tokens[1]).sum())
    report(args, figures, {}, tokens_that_differ=different)
    return 0


def make_params(rows: int, limits: dict[str, float]) -> SampleParams:
    """The same limits for all rows."""
    named = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    places = np.arange(rows)
    return SampleParams(
        **{name: np.full(rows, value) for name, value in named.items()},
        seeds=places.astype(np.uint64),
        positions=places,
    )


def microseconds(form: Form, logits: NDArray[np.float32], params: SampleParams) -> dict[str, float]:
    """The median of calls with each of `logits` [COPIES, R, V]."""
    clock, times = timer(1), []
    for some in [*logits] * CALLS:
        started = clock()
        form(some, params)
        times.append(clock() - started)
    return {"us": statistics.median(times) * 1e6}


if __name__ == "__main__":
    sys.exit(main())
