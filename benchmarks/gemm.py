#!/usr/bin/env python3
"""Products with packed matrices, `y [M, N] = x [M, K] W^T`, in each panel format and with torch in float32.

The matrices of a kind lie one after another in more memory than any cache holds, and are gone through in turn, so a
product of few rows takes the time in which its weights are read. Times are means of calls of a few products, the best
and the median of the calls (A B A B ... over the formats). GB/s counts packed weights, GFLOP/s two operations a
multiply-add. With one thread time is CPU time, so that other work on the machine takes less part in it. The limits are
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import numpy as np
import torch
from harness import timer
from numpy.typing import NDArray

from hybridtrt.plugins.linear.packing import pack
from hybridtrt.plugins.linear.panel_layout import packed_bytes
from hybridtrt.plugins.native.library import Node, Operand, Program, Weight
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.limits import measure_limits

KINDS = ("float32", "bfloat16", "int8", "int8:32", "int4:32", "torch")
CALL_SECONDS = 0.004  # of products in one call, about: short, so that some calls are not disturbed


def batch_of(rows: int) -> StepBatch:
    """A step of one sequence of `rows` tokens."""
    tokens, one, none = np.zeros(rows, np.int32), np.ones(1, np.int32), np.zeros(0, np.int32)
    return StepBatch(
        tokens, np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32), 0 * one, one, one, none, {}
    )


class Packed:
    """Copies of one matrix in a panel format, and programs over some of them."""

    def __init__(self, kind: str, n: int, k: int, megabytes: int, threads: int, isa: str | None) -> None:
        name, _, group = kind.partition(":")
        self.form, self.group, self.shape = f"panel_{name}", int(group or 0), (n, k)
        self.bytes = packed_bytes(self.shape, self.form, self.group)
        one = pack(torch.randn(n, k) / k**0.5, self.form, self.group)
        self.copies = np.tile(one, (max(2, megabytes * 1_000_000 // self.bytes), 1))
        self.threads, self.isa, self.next = threads, isa, 0

    def run(self, x: NDArray[np.float32], y: NDArray[np.float32], count: int) -> float:
        """Seconds of a product, the mean of `count`."""
        n, k = self.shape
        place = [Operand("external_T", z.ctypes.data, 0, z.shape[1], (z.shape[1],)) for z in (x, y)]
        nodes = []
        for _ in range(count):
            weight = Weight(self.copies[self.next], self.form, (n, k), self.group)
            self.next = (self.next + 1) % len(self.copies)
            nodes.append(Node("linear", (place[0],), (place[1],), (weight, None), (), ()))
        program, batch, clock = Program(nodes, 0, 0, (), self.threads, self.isa), batch_of(len(x)), timer(self.threads)
        started = clock()
        program.step(batch, 1)
        seconds = clock() - started
        program.close()
        return seconds / count


class Torch:
    """The same with torch's float32 product."""

    def __init__(self, n: int, k: int, megabytes: int, threads: int) -> None:
        self.bytes, self.threads = 4 * n * k, threads
        self.copies = [torch.randn(n, k) / k**0.5 for _ in range(max(2, megabytes * 1_000_000 // self.bytes))]
        self.next = 0

    def run(self, x: NDArray[np.float32], y: NDArray[np.float32], count: int) -> float:
        """Seconds of a product, the mean of `count`."""
        rows, out, clock = torch.from_numpy(x), torch.from_numpy(y), timer(self.threads)
        started = clock()
        for _ in range(count):
            torch.mm(rows, self.copies[self.next].T, out=out)
            self.next = (self.next + 1) % len(self.copies)
        return (clock() - started) / count


def main() -> int:
    """Print a line a kind and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128, 512], help="M")
    parser.add_argument("--shape", type=int, nargs=2, default=[2048, 1024], metavar=("N", "K"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="formats, with a group after a colon; torch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="instruction set (the widest)")
    parser.add_argument("--megabytes", type=int, default=300, help="of weights of each kind")
    parser.add_argument("--repeats", type=int, default=20, help="calls of each kind, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    n, k = args.shape
    limits = measure_limits(args.threads, args.isa)
    kinds: dict[str, Packed | Torch] = {
        kind: Torch(n, k, args.megabytes, args.threads)
        if kind == "torch"
        else Packed(kind, n, k, args.megabytes, args.threads, args.isa)
        for kind in args.kinds
    }
    found = []
    for rows in args.rows:
        x, y = np.random.default_rng(0).standard_normal((rows, k), np.float32), np.empty((rows, n), np.float32)
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        flops = 2 * rows * n * k
        for _ in range(args.repeats):
            for kind, product in kinds.items():
                least = product.bytes / limits.read_gb_per_s / 1e9 + flops / limits.gflop_per_s / 1e9
                seconds[kind].append(product.run(x, y, 2 + int(CALL_SECONDS / least)))
        for kind, product in kinds.items():
            best, median = min(seconds[kind]), statistics.median(seconds[kind])
            found.append(
                {
                    "kind": kind,
                    "rows": rows,
                    "ms": round(best * 1e3, 3),
                    "median_ms": round(median * 1e3, 3),
                    "gb_per_s": round(product.bytes / best / 1e9, 1),
                    "gflop_per_s": round(flops / best / 1e9, 1),
                }
            )
            if not args.json:
                print(
                    "{kind:10} M={rows:<4} {ms:8.3f} ms (median {median_ms:8.3f}) {gb_per_s:6.1f} GB/s "
                    "{gflop_per_s:7.1f} GFLOP/s".format(**found[-1]),
                    flush=True,
                )
    after = measure_limits(args.threads, args.isa)
    if args.json:
        print(json.dumps({"shape": [n, k], "products": found, "limits": [vars(limits), vars(after)]}))
    else:
        print(limits.render(), after.render(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
