#!/usr/bin/env python3
"""In-flight batching of a mixed trace against padded static batching and against one offline batch.

Prompts of 16 to 1,024 tokens and outputs of 16 to 128, evenly spread, arrive as a Poisson process, faster than the
engine can serve them: the first and the last of so few do not fill its batch. Static batching is the same engine: when
it is idle it takes what has come, up to a full batch, pads every prompt to the longest and runs all rows until the
longest output is complete. In its favour a request counts as finished when its own last token is there, and prefill is
chunked as for everybody else. Only tokens that were asked for count. Offline has all requests from the start.

The model is a random one. `--simulate` takes none: then a step takes 10 ms and 0.5 ms a token by a clock of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from harness import in_turn, parser, report
from load import Arrival, at_once, mixed_requests, poisson, random_runner, run
from simulation import simulated_runner

from hybridtrt.build.engine import BuildConfig
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.request import Request

LIMITS = BuildConfig(max_batch_size=16, max_num_tokens=512, max_seq_len=1280)
PROMPTS, OUTPUTS = (16, 1024), (16, 128)
PAD = 0


def main() -> int:
    """Print the figures of each kind and the ratios that are aimed at."""
    one = parser(__doc__)
    one.add_argument("--simulate", action="store_true", help="run no model")
    one.add_argument("--requests", type=int, default=240, help="requests of the trace (240)")
    one.add_argument("--load", type=float, default=1.4, help="arrivals over what offline batching serves (1.4)")
    one.set_defaults(repeats=2)
    args = one.parse_args()
    with nullcontext(simulated_runner(LIMITS)) if args.simulate else random_runner(LIMITS, args.threads) as watched:
        requests = mixed_requests(args.requests, PROMPTS, OUTPUTS, watched.info.vocab_size, ignore_eos=True)
        batch = at_once(poisson(requests, rate=1.0))
        seconds = min(run(Engine(watched), watched, batch).seconds for _ in range(2))  # the first one warms up
        rate = args.load * len(requests) / seconds
        trace = poisson(requests, rate)
        wanted = {request.id: request.params.max_tokens for request in requests}
        figures = in_turn(
            {
                "static": lambda: run(Engine(watched), watched, trace, static_batch, wanted.__getitem__).figures(),
                "in-flight": lambda: run(Engine(watched), watched, trace).figures(),
                "offline": lambda: run(Engine(watched), watched, batch).figures(),
            },
            args.repeats,
        )
    static, flight, offline = figures["static"], figures["in-flight"], figures["offline"]
    ratios = {
        "tokens/s, in-flight over static (at least 1.4)": flight["tokens/s"] / static["tokens/s"],
        "tokens/s, in-flight over offline (at least 0.9)": flight["tokens/s"] / offline["tokens/s"],
        "mean queue time, in-flight over static (below 0.33)": flight["queue mean s"] / static["queue mean s"],
    }
    report(args, figures, ratios, arrivals_per_s=rate, max_batch_size=LIMITS.max_batch_size)
    return 0


def static_batch(waiting: Sequence[Arrival], engine: Engine) -> list[Request]:
    """What static batching submits: nothing while a batch runs, then a padded batch of the oldest."""
    if engine.has_work or not waiting:
        return []
    batch = [arrival.request for arrival in waiting[: engine.info.max_batch_size]]
    prompt = max(len(request.prompt_ids) for request in batch)
    output = max(request.params.max_tokens for request in batch)
    return [
        replace(
            request,
            prompt_ids=(*request.prompt_ids, *[PAD] * (prompt - len(request.prompt_ids))),
            params=replace(request.params, max_tokens=output),
        )
        for request in batch
    ]


if __name__ == "__main__":
    sys.exit(main())
