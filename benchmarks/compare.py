#!/usr/bin/env python3
"""Our engine against its peers on the same checkpoints, with the same threads, at the same precision.

Every engine has a process of its own. In each measure they run in turn (A B A B ...), after one turn that does not
count; shown are the medians, and as ratio the median of each turn's ours / peer. GB/s are bytes of weights and
caches, as our engine has them, GFLOP/s the operators' own counts; both with their share of the machine's limits,
measured in the same run.

llama.cpp takes part where `--llama` (or LLAMA_FOLDER) names the folder of peers/build_llama.sh, vLLM where it can be
imported, here or by `--vllm-python`; transformers always, in float32. `bfloat16_rounded` has activations of bfloat16,
as the peers' bfloat16 does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from contenders import OURS, PEERS, WEIGHTS, Setup, available, start_ours
from processes import Job, Worker, WorkerError

from hybridtrt.runtime.limits import Limits, measure_limits
from hybridtrt.runtime.load import default_threads

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridtrt-compare"


@dataclass(frozen=True)
class Measure:
    """A phase of a job."""

    name: str
    job: Job
    phase: str  # prefill or decode

    def rate(self, answer: Mapping[str, Any]) -> float:
        """Tokens a second over the whole batch."""
        if self.phase == "prefill":
            return self.job.batch * self.job.prompt / float(answer["prefill_s"])
        return float(answer["decode_tokens"]) / float(answer["decode_s"])


@dataclass
class Found:
    """What one engine did, turn by turn; `failed` says why there is nothing."""

    answers: dict[Job, list[dict[str, Any]]] = field(default_factory=dict)
    failed: str = ""

    def rates(self, measure: Measure) -> list[float]:
        return [measure.rate(answer) for answer in self.answers.get(measure.job, [])]


def measures(args: argparse.Namespace) -> list[Measure]:
    """Those of the options; jobs that serve two measures run once."""
    one, many = Job(1, args.prompt, args.new), Job(args.batch, args.prompt, args.new)
    found = [Measure(f"prefill b1 x {args.prompt}", one, "prefill")]
    if args.long_prompt:
        long = Job(1, args.long_prompt, 2)
        found.append(Measure(f"prefill b1 x {args.long_prompt}", long, "prefill"))
    found.append(Measure("decode b1", one, "decode"))
    if args.batch > 1:
        found.append(Measure(f"prefill b{args.batch} x {args.prompt}", many, "prefill"))
        found.append(Measure(f"decode b{args.batch}", many, "decode"))
    return found


def run_model(
    model: Path, setup: Setup, peers: Sequence[str], asked: Sequence[Measure], repeats: int
) -> dict[str, Found]:
    """Run every engine on one model."""
    found: dict[str, Found] = {name: Found() for name in (OURS, *peers)}
    workers: dict[str, Worker] = {}

    def attempt(name: str, what: str, action: Any) -> Any:
        try:
            return action()
        except (WorkerError, ValueError, OSError) as error:
            found[name].failed = f"{what}: {error}"
            print(f"{model.name}: {name} failed, {what}: {error}", file=sys.stderr, flush=True)
            if name in workers:
                workers.pop(name).close()
            return None

    try:
        for name in found:
            print(f"{model.name}: starting {name}", file=sys.stderr, flush=True)
            start = start_ours if name == OURS else PEERS[name]
            worker = attempt(name, "start", partial(start, model, setup))
            if worker is not None:
                workers[name] = worker
        for job in dict.fromkeys(measure.job for measure in asked):
            print(f"{model.name}: batch {job.batch}, prompt {job.prompt}, new {job.new}", file=sys.stderr, flush=True)
            for turn in range(repeats + 1):
                for name in list(workers):
                    answer = attempt(name, f"batch {job.batch}", partial(workers[name].run, job))
                    if answer is not None and turn:
                        found[name].answers.setdefault(job, []).append(answer)
    finally:
        for worker in workers.values():
            worker.close()
    return found


def summarise(
    model: Path, weights: str, asked: Sequence[Measure], found: Mapping[str, Found], limits: Limits
) -> list[dict[str, Any]]:
    """One row a measure."""
    rows = []
    for measure in asked:
        ours = found[OURS].rates(measure)
        row: dict[str, Any] = {
            "model": model.name,
            "weights": weights,
            "measure": measure.name,
            "engines": {},
            "ratio": {},
        }
        for name, one in found.items():
            rates = one.rates(measure)
            if not rates:
                row["engines"][name] = {"failed": one.failed}
                continue
            answers = one.answers[measure.job]
            row["engines"][name] = {
                "tokens_per_s": round(statistics.median(rates), 2),
                "all": [round(rate, 2) for rate in rates],
                "peak_rss_mb": round(max(answer["peak_rss_mb"] for answer in answers), 1),
            }
            if name != OURS and ours:
                pairs = zip(ours, rates, strict=False)
                row["ratio"][name] = round(statistics.median(mine / theirs for mine, theirs in pairs), 3)
                row["engines"][name]["same_greedy_tokens"] = _agree(found[OURS], one, measure.job)
        if ours:
            achieved = [answer[measure.phase] for answer in found[OURS].answers[measure.job]]
            moved, computed = (statistics.median(one[name] for one in achieved) for name in ("gb_per_s", "gflop_per_s"))
            row["engines"][OURS] |= {
                "gb_per_s": moved,
                "memory_share": round(moved / limits.read_gb_per_s, 3),
                "gflop_per_s": computed,
                "compute_share": round(computed / limits.gflop_per_s, 3),
            }
        rows.append(row)
    return rows


def _agree(ours: Found, theirs: Found, job: Job) -> str:
    """How many tokens of the first sequence are the same before the first that differs."""
    mine, other = (one.answers[job][-1]["tokens"] for one in (ours, theirs))
    same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    return f"{same} of {min(len(mine), len(other))}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows as text, engines from left to right."""
    peers = list(dict.fromkeys(name for row in rows for name in row["engines"] if name != OURS))
    head = ["model", "weights", "measure", OURS, "GB/s", "of limit", "GFLOP/s", "of limit", "peak MB"]
    for name in peers:
        head += [name, "ratio", "peak MB", "tokens equal"]
    lines = [head]
    for row in rows:
        ours = row["engines"][OURS]
        line = [row["model"], row["weights"], row["measure"]]
        if "failed" in ours:
            line += ["failed", *[""] * 5]
        else:
            shares = (f"{ours['memory_share']:.0%}", f"{ours['compute_share']:.0%}")
            line += [f"{ours['tokens_per_s']:.1f}", f"{ours['gb_per_s']:.1f}", shares[0]]
            line += [f"{ours['gflop_per_s']:.1f}", shares[1], f"{ours['peak_rss_mb']:.0f}"]
        for name in peers:
            peer = row["engines"].get(name)
            if peer is None or "failed" in peer:
                line += ["-" if peer is None else "failed", "", "", ""]
                continue
            ratio = row["ratio"].get(name)
            line += [f"{peer['tokens_per_s']:.1f}", "" if ratio is None else f"{ratio:.2f}"]
            line += [f"{peer['peak_rss_mb']:.0f}", peer.get("same_greedy_tokens", "")]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def best(first: Limits, second: Limits) -> Limits:
    """What the machine could do in the less disturbed of two measurements."""
    return Limits(
        first.threads,
        first.isa,
        *(
            max(getattr(first, name), getattr(second, name))
            for name in ("read_gb_per_s", "gflop_per_s", "median_read_gb_per_s", "median_gflop_per_s")
        ),
    )


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("models", nargs="+", type=Path, help="folders of Hugging Face models")
    one.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["float32"], help="precisions (float32)")
    one.add_argument("--peer", action="append", choices=list(PEERS), help="by default all that are there")
    one.add_argument("--threads", type=int, default=default_threads(), help="of every engine (%(default)s)")
    one.add_argument("--repeats", type=int, default=5, help="turns that count (5)")
    one.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    one.add_argument("--long-prompt", type=int, default=1024, help="of a second prefill (1024); 0: none")
    one.add_argument("--new", type=int, default=32, help="tokens to generate (32)")
    one.add_argument("--batch", type=int, default=8, help="of the second decode (8); 1: none")
    folder = os.environ.get("LLAMA_FOLDER")
    one.add_argument("--llama", type=Path, default=folder and Path(folder), help="folder of peers/build_llama.sh")
    one.add_argument("--vllm-python", help="an interpreter that has vLLM")
    one.add_argument("--cache", type=Path, default=CACHE, help="where engines and GGUF files are kept (%(default)s)")
    one.add_argument("--rebuild", action="store_true", help="build our engines again")
    one.add_argument("--walker", default="cpu", help="of our engine: cpu (default) or torch")
    one.add_argument("--max-num-tokens", type=int, default=0, help="tokens in one step of our engine (its default)")
    one.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return one


def main() -> int:
    """Compare, print one table. Status 1 where an engine of ours failed."""
    args = make_parser().parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    limits = measure_limits(args.threads)
    rows: list[dict[str, Any]] = []
    asked = measures(args)
    longest = max(measure.job.prompt + measure.job.new for measure in asked)
    for model in args.models:
        for weights in args.weights:
            built = {"max_seq_len": longest, "max_batch_size": max(args.batch, 1)}
            if args.max_num_tokens:
                built["max_num_tokens"] = args.max_num_tokens
            setup = Setup(
                args.cache, args.threads, weights, built, args.llama, args.vllm_python, args.walker, args.rebuild
            )
            peers = [name for name in args.peer or PEERS if name in available(setup)]
            found = run_model(model, setup, peers, asked, args.repeats)
            limits = best(limits, measure_limits(args.threads))
            rows += summarise(model, weights, asked, found, limits)
            _write(args.json, rows, limits)
    print(table(rows))
    print(limits.render())
    return int(any("failed" in row["engines"][OURS] for row in rows))


def _write(path: Path | None, rows: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    if path is not None:
        path.write_text(json.dumps({"rows": rows, "limits": vars(limits)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
