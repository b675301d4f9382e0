#!/usr/bin/env python3
"""vllm_worker.py MODEL THREADS DTYPE: vLLM on the CPU behind protocol.py.

Decode is what a batch takes beyond the same batch with one token each.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from protocol import Job, Prompts, serve
from vllm import LLM, SamplingParams


def load() -> tuple[int, Job]:
    """The engine, and a job by its `generate`."""
    llm = LLM(sys.argv[1], dtype=sys.argv[3], enforce_eager=True, max_model_len=2048, enable_prefix_caching=False)

    def run(prompts: Prompts, new: int) -> tuple[float, list[int]]:
        asked = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True)
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return time.perf_counter() - started, list(outputs[0].outputs[0].token_ids)

    def job(prompts: Prompts, new: int) -> dict[str, Any]:
        first, _ = run(prompts, 1)
        whole, tokens = run(prompts, new)
        answer = {"prefill_s": first, "decode_s": whole - first, "decode_tokens": len(prompts) * (new - 1)}
        return {**answer, "tokens": tokens}

    return int(llm.llm_engine.model_config.get_vocab_size()), job


if __name__ == "__main__":
    serve(load)
