#!/usr/bin/env python3
"""Admission where pages are scarce: all of prompt + max_tokens reserved, half the output expected, or a profile.

Requests of 16 to 512 tokens ask for 256 more and mostly end early: one token in 64 of the vocabulary stops them, and
they sample almost evenly from it. The profile is that of a sample of the same kind with other prompts. Every run has
the same requests with the same seeds, so the same work, at the same times.

The policies are those of the real engine. Its steps are simulated, so that there can be enough requests for a P99: a
step takes 10 ms and 0.5 ms a token, about what a small model takes here. `--engine` runs a random model instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from harness import in_turn, parser, report
from load import Arrival, WatchedRunner, at_once, mixed_requests, poisson, random_runner, run
from simulation import simulated_runner

from hybridtrt.build.engine import BuildConfig
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.profile import FORMAT, Profile, StepProfile
from hybridtrt.runtime.profiler import profile_ranges
from hybridtrt.runtime.request import Request

LIMITS = BuildConfig(max_batch_size=16, max_num_tokens=512, max_seq_len=1024)
PROMPTS, MOST_NEW, STOP_EVERY = (16, 512), 256, 64
SAMPLE = 100  # requests of the profile


def main() -> int:
    """Print the figures of each policy and their ratios to worst-case reservation."""
    one = parser(__doc__)
    one.add_argument("--engine", action="store_true", help="run a random model")
    one.add_argument("--requests", type=int, help="requests of the trace (800; 32 of a random model)")
    one.add_argument("--kv-cache-tokens", type=int, default=2048, help="tokens in the pages of a group (2048)")
    one.add_argument("--load", type=float, default=1.2, help="arrivals over what worst-case reservation serves (1.2)")
    one.set_defaults(repeats=1)
    args = one.parse_args()
    count = args.requests or (32 if args.engine else 800)
    runner = (
        random_runner(LIMITS, args.threads, args.kv_cache_tokens)
        if args.engine
        else nullcontext(simulated_runner(LIMITS, args.kv_cache_tokens))
    )
    with runner as watched:
        profile = measured(watched)
        batch = at_once(poisson(early_ends(count, watched, seed=0), rate=1.0))
        worst = partial(Engine, watched, None, EngineOptions(enable_block_reuse=False))
        expecting = EngineOptions(enable_block_reuse=False, policy="max_utilization")
        rate = args.load * count / run(worst(), watched, batch).seconds
        trace = poisson([arrival.request for arrival in batch], rate)
        kinds: dict[str, Callable[[], Engine]] = {
            "worst case reserved": worst,
            "half the output": partial(Engine, watched, None, expecting),
            "profile": partial(Engine, watched, None, expecting, profile),
        }
        figures = in_turn({kind: partial(serve, make, watched, trace) for kind, make in kinds.items()}, args.repeats)
    base, names = figures["worst case reserved"], ("queue mean s", "queue P99 s", "latency P99 s", "tokens/s")
    ratios = {
        f"{name}, {kind} over worst case": figures[kind][name] / base[name]
        for kind in ("half the output", "profile")
        for name in names
    }
    report(args, figures, ratios, arrivals_per_s=rate, kv_cache_tokens=args.kv_cache_tokens, requests=count)
    return 0


def early_ends(count: int, watched: WatchedRunner, seed: int) -> list[Request]:
    """Requests that ask for more than they mostly get."""
    vocab = watched.info.vocab_size
    stops = tuple(range(0, vocab, STOP_EVERY))
    return mixed_requests(count, PROMPTS, (MOST_NEW, MOST_NEW), vocab, seed, temperature=1.0, stop_token_ids=stops)


def measured(watched: WatchedRunner) -> Profile:
    """The profile of a sample of such requests; of steps it has only what preempting costs."""
    engine = Engine(watched, None, EngineOptions(enable_block_reuse=False))
    ranges = tuple(profile_ranges(engine, early_ends(SAMPLE, watched, seed=1)))
    costs = watched.info.costs
    return Profile(FORMAT, "", ranges, (), (StepProfile(1, costs.seconds_per_token, None),), costs.copy_bytes_per_s)


def serve(make: Callable[[], Engine], watched: WatchedRunner, trace: Sequence[Arrival]) -> dict[str, float]:
    """One run of the trace, checked for pages and slots that were lost."""
    engine = make()
    figures = run(engine, watched, trace).figures()
    engine.check_integrity()
    counters = engine.statistics()
    return figures | {"preemptions": counters["preempted_recompute"] + counters["preempted_swap"]}


if __name__ == "__main__":
    sys.exit(main())
