"""What the benchmarks share: an engine of a random model, the limits of the machine, medians and their output."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hybridtrt.build.build import build
from hybridtrt.build.engine import BuildConfig
from hybridtrt.converters.convert import convert

VOCAB = 4096
MODEL = {  # about 8 million parameters: three layers of gated delta and one of attention, each with experts
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 192,
    "max_position_embeddings": 4096,
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    one = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    one.add_argument(
        "--threads", type=int, default=1, help="compute threads (1); with more, time is not CPU time but wall time"
    )
    one.add_argument("--repeats", type=int, default=3, help="runs of each kind, in turn (3); medians are shown")
    return one


@contextmanager
def random_engine(limits: BuildConfig, change: Callable[[Any], None] = lambda model: None) -> Iterator[Path]:
    """An engine of random weights, Qwen3-Next in small; `change` may edit the model of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_next", **MODEL)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    change(model)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="hybridtrt-bench-") as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        convert(folder / "model", folder / "checkpoint", "float32")
        build(folder / "checkpoint", folder / "engine", limits)
        yield folder / "engine"


def in_turn(kinds: Mapping[str, Callable[[], Mapping[str, float]]], repeats: int) -> dict[str, dict[str, float]]:
    """Run A B B A ... and return the median of each figure by kind."""
    runs: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        for kind in list(kinds)[:: -1 if repeat % 2 else 1]:  # so that no kind is always the one that follows another
            print(f"{kind} {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
            runs[kind].append(kinds[kind]())
    return {
        kind: {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
        for kind, found in runs.items()
    }


def timer(threads: int) -> Callable[[], float]:
    """Seconds; with one thread those of the process, so that other work on the machine does not count."""
    return time.process_time if threads == 1 else time.perf_counter


def machine(threads: int) -> dict[str, Any]:
    """The processor, and what torch reaches on it now: reading 256 MB, and a product of 1024 x 1024 matrices."""
    import torch

    torch.set_num_threads(threads)
    data, square = torch.ones(1 << 26), torch.ones(1024, 1024)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "threads": threads,
        "torch": torch.__version__,
        "read_gb_per_s": round(data.nbytes / best_seconds(data.sum) / 1e9, 1),
        "gemm_gflop_per_s": round(2 * 1024**3 / best_seconds(lambda: square @ square) / 1e9, 1),
    }


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of some runs."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation."""
    return float(np.percentile(values, percent))


def report(
    args: argparse.Namespace, kinds: Mapping[str, Mapping[str, float]], ratios: Mapping[str, float], **more: Any
) -> None:
    """Print a table of figures by kind, the ratios and the machine, or all of it as JSON."""
    limits = machine(args.threads)
    if args.json:
        print(json.dumps({"figures": kinds, "ratios": ratios, **more, "machine": limits}))
        return
    columns = list(next(iter(kinds.values())))
    rows = [("", *columns), *((kind, *(f"{found[name]:.4g}" for name in columns)) for kind, found in kinds.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
        )
    for name, value in {**ratios, **more}.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    print(", ".join(f"{name} {value}" for name, value in limits.items()))
