"""Offline generation: prompts to results, all in one in-flight batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import FinishReason, Output, Request, SamplingParams
from hybridtrt.runtime.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Generation:
    """What one prompt got. `text` is None where the engine has no tokenizer; `error` is set if the prompt failed."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None


def generate(
    engine_dir: str | Path,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    options: RuntimeOptions | None = None,
    on_output: Callable[[Output], None] | None = None,
) -> list[Generation]:
    """Run every prompt (text or token ids) and return the results in the order asked.

    Raises `ValueError`, naming the prompt, before anything runs if one of them is invalid.
    """
    runner = load_runner(engine_dir, options)
    tokenizer = load_tokenizer(Path(engine_dir))
    requests = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(f"{engine_dir} has no tokenizer: give token ids instead of text")
            prompt = tokenizer.encode(prompt)
        requests.append(Request(f"prompt {i}", tuple(prompt), params))
    engine = Engine(runner, tokenizer)
    try:
        results = engine.generate(requests, on_output)
    finally:
        engine.close()
    return [
        Generation(
            request.prompt_ids,
            result.token_ids,
            None if tokenizer is None else result.text,
            result.finish_reason,
            result.error,
        )
        for request, result in zip(requests, results, strict=True)
    ]
