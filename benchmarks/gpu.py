#!/usr/bin/env python3
"""Every kernel in the Triton language on this GPU: whether it is right, then how fast it is.

First each kernel runs on random data and is compared with its operator's definition in float64. Then it is timed at
the shapes of published models, decoding at several batch sizes and prefilling, beside what the card can do: copying
memory and multiplying matrices, measured in the same run. Where flash-linear-attention or FlashInfer is installed, its
kernel runs on the same shapes.

It needs torch and triton (3.6 or later) alone. With --device cpu it runs the numerics through Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
if "--device=cpu" in sys.argv or ("--device" in sys.argv and "cpu" in sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_calls import CALLS  # noqa: E402
from gpu_operands import Rows, moved_bytes, operands, operations  # noqa: E402
from gpu_peers import PEERS  # noqa: E402

from hybridtrt.plugins.call import Call  # noqa: E402
from hybridtrt.plugins.gpu.torch_launch import TorchLauncher  # noqa: E402
from hybridtrt.plugins.ragged import Step  # noqa: E402
from hybridtrt.plugins.registry import kernel  # noqa: E402
from hybridtrt.plugins.spec import TensorSpec  # noqa: E402
from hybridtrt.plugins.step import StepBatch  # noqa: E402

TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 4e-2}  # of the largest value of the definition
NUMERICS = {"cuda": Rows((1, 70, 129, 5, 1), (37, 0, 20, 9, 200)), "cpu": Rows((1, 17, 3), (5, 0, 9))}
LOADS = {
    "decode 1": Rows((1,), (2048,)),
    "decode 32": Rows((1,) * 32, (2048,) * 32),
    "decode 128": Rows((1,) * 128, (2048,) * 128),
    "prefill 2048": Rows((2048,), (0,)),
    "prefill 8192": Rows((8192,), (0,)),
    "prefill 8 x 1024": Rows((1024,) * 8, (0,) * 8),
}


@dataclass(frozen=True)
class Right:
    """A comparison: the largest error of results and caches, as a share of the largest value of the definition."""

    call: str
    error: float
    allowed: float


@dataclass(frozen=True)
class Timed:
    """A measurement: milliseconds in the median, and what that is of the card's limits."""

    call: str
    load: str
    ms: float
    gb_per_s: float
    tflop_per_s: float
    of_bandwidth: float
    of_matrix_peak: float
    peers: dict[str, float]  # milliseconds


def compare(name: str, call: Call, rows: Rows, device: str, seed: int) -> Right:
    """Results and caches of one step against the definition in float64, on the same rounded operands."""
    memory = operands(call, rows, device, seed)
    exact = {key: None if x is None else x.detach().cpu().clone() for key, x in memory.items()}
    launcher = TorchLauncher(call, memory)
    launcher.run()
    caches = {one.name: _wide(exact[one.name]) for one in call.of("cache")}
    inputs = [_wide(exact[one.name]) for one in call.of("input")]
    # The definition widens the matrices of one expert at a time; those of all would take tens of gigabytes.
    kept = ("up", "down") if call.op == "experts" else ()
    weights = {one.name: exact[one.name] if one.name in kept else _wide(exact[one.name]) for one in call.of("weight")}
    wanted = kernel(call.op, "torch")(_as_step(exact, rows), *inputs, **weights, **caches, **call.attributes)
    pairs = list(zip(launcher.results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True))
    pairs += [(memory[one][1:], cache[1:]) for one, cache in caches.items()]
    worst = 0.0
    for got, want in pairs:
        difference = (got.cpu().double() - want.double()).abs().max().nan_to_num(torch.inf).item()
        worst = max(worst, difference / max(want.abs().max().item(), 1e-9))
    return Right(name, worst, TOLERANCE[call.of("input")[0].spec.dtype])


def _wide(tensor: Any) -> Any:
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _as_step(memory: dict[str, Any], rows: Rows) -> Step:
    lengths, contexts = torch.tensor(rows.lengths), torch.tensor(rows.contexts)
    zeros = torch.zeros_like(lengths)
    positions = [torch.arange(c, c + n) for n, c in zip(rows.lengths, rows.contexts, strict=True)]
    arrays: dict[str, Any] = {
        "input_ids": torch.zeros(sum(rows.lengths), dtype=torch.int64),
        "positions": torch.cat(positions),
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        "context_lens": contexts,
        "state_src": zeros,
        "state_dst": zeros + 1,
        "logits_indices": zeros[:0],
    }
    arrays |= {name: memory[name] for name in arrays if memory.get(name) is not None}
    tables = {} if memory.get("block_tables") is None else {"g": memory["block_tables"]}
    return Step(StepBatch(**arrays, block_tables=tables, token_slots=memory.get("token_slots")))


def seconds(run: Callable[[], None]) -> float:
    """The median time of one run, from a CUDA graph of it."""
    return float(triton.testing.do_bench_cudagraph(run, rep=30, return_mode="median")) / 1e3


def limits() -> tuple[float, float]:
    """What copying moves in bytes a second, and multiplying 16-bit matrices does in operations a second."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * a.nbytes / seconds(lambda: b.copy_(a)), 2 * 8192**3 / seconds(lambda: torch.mm(x, x, out=y))


def measure(name: str, call: Call, load: str, bandwidth: float, peak: float) -> Timed | None:
    """None where the card has not the memory for it."""
    rows = LOADS[load]
    try:
        memory = operands(call, rows, "cuda", 0)
        taken = seconds(TorchLauncher(call, memory).run)
        peers = {peer: 1e3 * seconds(run) for peer, make in PEERS.items() if (run := make(call, rows, memory))}
    except torch.OutOfMemoryError:
        return None
    moved, done = moved_bytes(call, rows), operations(call, rows)
    rates = moved / taken / 1e9, done / taken / 1e12
    return Timed(name, load, 1e3 * taken, *rates, moved / taken / bandwidth, done / taken / peak, peers)


def runs_here(call: Call) -> bool:
    """Whether this GPU has all dtypes of a call: FP8 is there from 8.9 on."""
    return torch.cuda.get_device_capability() >= (8, 9) or all(one.spec.dtype != "fp8" for one in call.operands)


def chosen(pattern: str, device: str) -> Iterator[tuple[str, Call]]:
    """Calls by name; the interpreter multiplies no bfloat16 matrices, so it gets float16 instead."""
    for name, call in CALLS.items():
        if fnmatchcase(name, pattern) and (device != "cuda" or runs_here(call)):
            yield name, call if device == "cuda" else _in_float16(call)


def _in_float16(call: Call) -> Call:
    def typed(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype="float16") if spec.dtype == "bfloat16" else spec

    operands = tuple(replace(operand, spec=typed(operand.spec)) for operand in call.operands)
    return replace(call, operands=operands, results=tuple(typed(result) for result in call.results))


def main() -> int:
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: by the interpreter (cuda)")
    one.add_argument("--only", default="*", metavar="PATTERN", help="calls whose names match (all)")
    one.add_argument("--check-only", action="store_true", help="compare and do not time")
    one.add_argument("--seed", type=int, help="of the random data (the time)")
    one.add_argument("--seconds", type=float, default=420.0, help="stop timing after so long (420)")
    one.add_argument("--json", type=Path, help="write everything to this file, too")
    args = one.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        one.error("PyTorch finds no GPU; --device cpu runs the numerics through Triton's interpreter")
    started = time.monotonic()
    seed = int(time.time()) if args.seed is None else args.seed
    card = torch.cuda.get_device_name() if args.device == "cuda" else "Triton's interpreter"
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}, seed {seed}", flush=True)
    checks = []
    for name, call in chosen(args.only, args.device):
        checks.append(right := compare(name, call, NUMERICS[args.device], args.device, seed))
        verdict = "ok" if right.error <= right.allowed else "WRONG"
        print(f"{verdict:5} {name:40} {right.error:.1e} of {right.allowed:.0e}", flush=True)
    found: list[Timed] = []
    if args.device == "cuda" and not args.check_only:
        bandwidth, peak = limits()
        print(f"copying {bandwidth / 1e9:.0f} GB/s, bfloat16 matrices {peak / 1e12:.0f} TFLOP/s", flush=True)
        print(f"{'':40} {'load':18} {'ms':>9} {'GB/s':>7} {'TFLOP/s':>8}  of copying  of matrices", flush=True)
        for load, (name, call) in product(LOADS, list(chosen(args.only, args.device))):
            if time.monotonic() - started > args.seconds:
                print(f"stopped after {args.seconds:.0f} s", flush=True)
                break
            if call.of("input")[0].spec.dtype == "float32":
                continue  # not what anybody runs
            timed = measure(name, call, load, bandwidth, peak)
            if timed is not None:
                found.append(timed)
                _print(timed)
    if args.json is not None:
        data = {"card": card, "seed": seed, "checks": [asdict(c) for c in checks], "times": [asdict(t) for t in found]}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0 if all(right.error <= right.allowed for right in checks) else 1


def _print(timed: Timed) -> None:
    others = "".join(f"  {peer} {ms:.4f} ms ({ms / timed.ms:.2f} times)" for peer, ms in timed.peers.items())
    print(
        f"{timed.call:40} {timed.load:18} {timed.ms:9.4f} {timed.gb_per_s:7.0f} {timed.tflop_per_s:8.1f}"
        f"  {timed.of_bandwidth:9.0%}  {timed.of_matrix_peak:10.0%}{others}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
