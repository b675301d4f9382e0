#!/usr/bin/env python3
"""transformers_worker.py MODEL THREADS: transformers in float32, not compiled, behind protocol.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from protocol import Job, Prompts, serve, timed


def load() -> tuple[int, Job]:
    """The model, and a job by its `generate`."""
    torch.set_num_threads(int(sys.argv[2]))
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    class Clock(transformers.StoppingCriteria):
        """Notes when each token was there."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    @torch.inference_mode()
    def job(prompts: Prompts, new: int) -> dict[str, Any]:
        ids, clock = torch.tensor(prompts), Clock()
        asked = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=asked,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        return {**timed(started, clock.times, len(prompts)), "tokens": output[0, ids.shape[1] :].tolist()}

    return int(model.config.get_text_config().vocab_size), job


if __name__ == "__main__":
    serve(load)
