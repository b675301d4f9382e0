"""Attention kernels against torch's fused attention over keys and values that lie together: A B A B …, medians.

`python benchmarks/attention.py [--threads N] [--seconds S] [CASE …]` prints for each case the milliseconds of both, how
many times as fast ours is, and GB/s of keys and values or GFLOP/s. With one thread processor time counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from hybridtrt.plugins.native.library import Node, Operand, Pool, Program
from hybridtrt.plugins.step import StepBatch

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
CASES = {
    **{f"decode b{b} at {n}": (b, n - 1, 1) for n in (128, 1000, 8000) for b in (1, 8)},
    **{f"prefill {n}": (1, 0, n) for n in (128, 1024)},
    "draft 4 at 8000": (1, 7996, 4),
    "chunk 128 at 8000": (1, 7872, 128),
}


def ours(
    rows: int, context: int, tokens: int, threads: int, dtype: str, heads: int, kv_heads: int
) -> tuple[Callable[[], object], int]:
    """A call of the kernel, and the bytes of a number in its pool."""
    total = context + tokens
    pages = -(-total // PAGE)
    pool = torch.randn(rows * pages + 1, PAGE, 2, kv_heads, DIM).to(getattr(torch, dtype))
    order = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages).astype(np.int32) + 1
    q, k, v = (torch.randn(rows * tokens, h, DIM) for h in (heads, kv_heads, kv_heads))
    out = torch.zeros_like(q)

    def operand(x: torch.Tensor) -> Operand:
        return Operand("external_T", x.data_ptr(), 0, x[0].numel(), tuple(x.shape[1:]))

    array = (pool if dtype == "float32" else pool.view(torch.uint16)).numpy()
    node = Node("attention", (operand(q), operand(k), operand(v)), (operand(out),), (None,), (Pool(array, dtype),),
                (0.0, DIM**-0.5, float("nan"), float("nan")))  # fmt: skip
    program = Program([node], 0, 0, ["g"], threads, os.environ.get("HYBRIDTRT_ISA"))
    zeros = np.zeros(rows, np.int32)
    batch = StepBatch(
        input_ids=np.zeros(rows * tokens, np.int32),
        positions=np.tile(np.arange(context, total, dtype=np.int32), rows),
        cu_seqlens=np.arange(rows + 1, dtype=np.int32) * tokens,
        context_lens=zeros + context,
        state_src=zeros,
        state_dst=zeros,
        logits_indices=np.zeros(0, np.int32),
        block_tables={"g": order},
    )
    keep = (q, k, v, out, pool, program)
    return (lambda: (program.step(batch, 1), keep)), pool.element_size()


def theirs(rows: int, context: int, tokens: int, heads: int, kv_heads: int) -> Callable[[], object]:
    """torch's fused attention; for a prompt causal, for a chunk with its mask."""
    total = context + tokens
    q = torch.randn(rows, heads, tokens, DIM)
    k, v = (torch.randn(rows, kv_heads, total, DIM) for _ in range(2))
    mask = None if tokens == 1 or not context else torch.arange(total) <= torch.arange(context, total)[:, None]
    causal = tokens > 1 and not context
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of names of cases (all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="of our pool (%(default)s)")
    parser.add_argument("--heads", type=int, nargs=2, default=(HEADS, KV_HEADS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter  # others may use the machine
    heads, kv_heads = args.heads
    for name, (rows, context, tokens) in CASES.items():
        if args.cases and not any(case in name for case in args.cases):
            continue
        mine, size = ours(rows, context, tokens, args.threads, args.dtype, heads, kv_heads)
        both = (mine, theirs(rows, context, tokens, heads, kv_heads))
        times: list[list[float]] = [[], []]
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end or len(times[1]) < 5:
            for call, found in zip(both, times, strict=True):
                start = clock()
                call()
                found.append(clock() - start)
        fast = [statistics.median(found) for found in times]
        best = [min(found) for found in times]
        bytes_read = rows * (context + tokens) * 2 * kv_heads * DIM * size
        flops = 4 * rows * heads * DIM * sum(range(context + 1, context + tokens + 1))
        rate = f"{bytes_read / best[0] / 1e9:6.1f} GB/s" if tokens == 1 else f"{flops / best[0] / 1e9:6.1f} GFLOP/s"
        print(
            f"{name:20} ours {fast[0] * 1e3:8.3f} ms, torch {fast[1] * 1e3:8.3f} ms: {fast[1] / fast[0]:5.2f}x "
            f"(best {best[0] * 1e3:8.3f}, {best[1] * 1e3:8.3f}: {best[1] / best[0]:5.2f}x), {rate}",
            flush=True,
        )


if __name__ == "__main__":
    main()
