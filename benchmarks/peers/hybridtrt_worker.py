#!/usr/bin/env python3
"""hybridtrt_worker.py ENGINE THREADS [WALKER]: our engine behind protocol.py."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from protocol import Job, Prompts, serve

from hybridtrt.runtime.bench import Bench
from hybridtrt.runtime.load import RuntimeOptions, load_runner


def load() -> tuple[int, Job]:
    """The engine, and a job that also says what was moved and computed a second."""
    engine, threads, walker = [*sys.argv[1:], "cpu"][:3]
    bench = Bench(load_runner(engine, RuntimeOptions(int(threads), walker=walker, enable_block_reuse=False)))

    def job(prompts: Prompts, new: int) -> dict[str, Any]:
        run = bench.run(prompts, new)
        return {
            "prefill_s": run.prefill_seconds,
            "decode_s": run.decode_seconds,
            "decode_tokens": run.decode_tokens,
            "tokens": run.tokens["bench-0"],
            "prefill": asdict(bench.achieved(run.prefill_steps, run.prefill_seconds)),
            "decode": asdict(bench.achieved(run.decode_steps, run.decode_seconds)),
        }

    return bench.info.vocab_size, job


if __name__ == "__main__":
    serve(load)
