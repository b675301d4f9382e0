"""Offline generation: prompts to results, all in one in-flight batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrt.runtime.load_engine import load_engine
from hybridtrt.runtime.request import FinishReason, Output, Request, SamplingParams, TopLogProbs
from hybridtrt.runtime.run_options import RunOptions


@dataclass(frozen=True)
class Generation:
    """One answer to a prompt. `text` is None where the engine has no tokenizer; `error` is set if the answer failed."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[tuple[float, TopLogProbs], ...] = ()


def generate(
    engine_dir: str | Path,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    options: RunOptions | None = None,
    on_output: Callable[[Output], None] | None = None,
) -> list[Generation]:
    """Run every prompt (text or token ids) and return its `params.n` answers, in the order asked.

    Raises `ValueError`, naming the prompt, before anything runs if one of them is invalid.
    """
    engine = load_engine(engine_dir, options)
    try:
        requests = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if engine.tokenizer is None:
                    raise ValueError(f"{engine_dir} has no tokenizer: give token ids instead of text")
                prompt = engine.tokenizer.encode(prompt)
            requests.append(Request(f"prompt {i}", tuple(prompt), params))
        results = engine.generate(requests, on_output)
    finally:
        engine.close()
    asked = (request for request in requests for _ in range(params.n))
    return [
        Generation(
            request.prompt_ids,
            result.token_ids,
            None if engine.tokenizer is None else result.text,
            result.finish_reason,
            result.error,
            result.log_probs,
            result.top_log_probs,
            result.prompt_log_probs,
        )
        for request, result in zip(asked, results, strict=True)
    ]
