#!/usr/bin/env python3
"""What a decoded token costs by the tokens before it, layer kind by layer kind, and a chart of it.

Steps are timed one at a time, node by node, at each length in turn (A B A B ...); shown are medians. The pages and
states hold zeros: what is in them does not matter for the time. A layer kind that reads a state costs the same at any
length; one that attends to all tokens does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from chart import Panel, line_chart
from contenders import WEIGHTS, Setup, our_engine

from hybridtrt.build.engine import is_engine
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.limits import measure_limits
from hybridtrt.runtime.load import RuntimeOptions, default_threads, load_runner
from hybridtrt.runtime.node_profile import profile_phase
from hybridtrt.runtime.step_log import LoggedStep, LoggingRunner
from hybridtrt.runtime.step_profiler import StepProfiler
from hybridtrt.runtime.work import counted_nodes

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridtrt-compare"
WHOLE = "whole step"


def measure(engine: Path, lengths: Sequence[int], batch: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    """By length: milliseconds, GB/s and GFLOP/s of each layer kind in a decode step of `batch` sequences.

    Raises `ValueError` for an engine that is too small or that does not run on the C++ kernels.
    """
    runner = load_runner(engine, RuntimeOptions(threads=threads, enable_block_reuse=False))
    try:
        if not isinstance(runner, CpuRunner):
            raise ValueError(f"{engine}: only the C++ kernels are timed node by node")
        info = runner.info
        if max(lengths) >= info.max_seq_len or batch > info.max_batch_size:
            limits = f"max_seq_len {info.max_seq_len}, max_batch_size {info.max_batch_size}"
            raise ValueError(f"{engine} is too small for lengths {lengths} and batch {batch}: {limits}")
        nodes, log, make = counted_nodes(runner), LoggingRunner(runner, profile=True), StepProfiler(runner)
        steps: dict[int, list[LoggedStep]] = {length: [] for length in lengths}
        for turn in range(repeats + 1):
            for length in lengths:
                log.steps.clear()
                log.step(make.batch(batch, 1, length))
                if turn:  # the first one touches the memory
                    steps[length] += log.steps
    finally:
        runner.close()
    found = []
    for length in lengths:
        profiles = [profile_phase("decode", nodes, [step], _seconds(step)) for step in steps[length]]
        kinds = {line.name: [] for line in profiles[0].kinds if line.milliseconds}
        for profile in profiles:
            for line in profile.kinds:
                if line.name in kinds:
                    kinds[line.name].append(line)
        found.append(
            {
                "context": length,
                "milliseconds": statistics.median(profile.milliseconds for profile in profiles),
                "kinds": {
                    name: {
                        figure: statistics.median(getattr(line, figure) for line in lines)
                        for figure in ("milliseconds", "gb_per_s", "gflop_per_s")
                    }
                    for name, lines in kinds.items()
                },
            }
        )
    return found


def _seconds(step: LoggedStep) -> float:
    assert step.node_seconds is not None
    return float(step.node_seconds.sum())


def table(found: Sequence[dict[str, Any]]) -> str:
    """Milliseconds a step by kind and length, and how much more the longest costs than the shortest."""
    rows = [("", *(f"{one['context']:,}" for one in found), "longest / shortest")]
    for name in (WHOLE, *found[0]["kinds"]):
        times = [one["milliseconds"] if name == WHOLE else one["kinds"][name]["milliseconds"] for one in found]
        rows.append((name, *(f"{time:.3f}" for time in times), f"{times[-1] / times[0]:.2f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))]) for row in rows
    )


def panel(title: str, found: Sequence[dict[str, Any]]) -> Panel:
    """One model's lines."""
    lines = {WHOLE: [one["milliseconds"] for one in found]}
    for name in found[0]["kinds"]:
        lines[name] = [one["kinds"][name]["milliseconds"] for one in found]
    return Panel(title, [one["context"] for one in found], lines)


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("models", nargs="+", type=Path, help="folders of Hugging Face models, or engines")
    one.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 6000, 8000], help="tokens before")
    one.add_argument("--batch", type=int, default=1, help="sequences (1)")
    one.add_argument("--weights", choices=WEIGHTS, default="float32", help="of engines that are built (float32)")
    one.add_argument("--threads", type=int, default=default_threads(), help="compute threads (%(default)s)")
    one.add_argument("--repeats", type=int, default=15, help="steps at each length that count (15)")
    one.add_argument("--cache", type=Path, default=CACHE, help="where engines are kept (%(default)s)")
    one.add_argument("--svg", type=Path, metavar="FILE", help="chart to write, such as docs/context.svg")
    one.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return one


def main() -> int:
    """Measure every model; print a table of each."""
    args = make_parser().parse_args()
    limits = measure_limits(args.threads)
    lengths = sorted(args.lengths)
    setup = Setup(
        args.cache, args.threads, args.weights, {"max_seq_len": lengths[-1] + 1, "max_batch_size": args.batch}
    )
    results: dict[str, list[dict[str, Any]]] = {}
    for model in args.models:
        print(f"{model.name}: {args.repeats} steps at each of {len(lengths)} lengths", file=sys.stderr, flush=True)
        engine = model if is_engine(model) else our_engine(model, setup)
        results[model.name] = measure(engine, lengths, args.batch, args.threads, args.repeats)
        print(f"{model.name}, batch {args.batch}, ms a step by tokens before it\n{table(results[model.name])}\n")
    print(limits.render())
    if args.json:
        data = {"batch": args.batch, "weights": args.weights, "models": results, "limits": vars(limits)}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if args.svg:
        panels = [panel(name, found) for name, found in results.items()]
        chart = line_chart(panels, "tokens before", f"ms a decode step (batch {args.batch})")
        args.svg.write_text(chart, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
