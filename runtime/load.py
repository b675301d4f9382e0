"""From an engine folder to a runner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtrt.build.engine import ENGINE_FILE, EngineConfig, read_engine_config
from hybridtrt.build.network import build_program
from hybridtrt.converters.checkpoint import open_weights
from hybridtrt.runtime.runner import Runner, RunnerInfo
from hybridtrt.runtime.torch_runner import TorchRunner


@dataclass(frozen=True)
class RuntimeOptions:
    """Choices of a run, not of an engine.

    `kv_cache_tokens` bounds the tokens that the pages of one group hold; by default the longest sequences of a full
    batch fit at once. `threads` None leaves torch's default.
    """

    threads: int | None = None
    kv_cache_tokens: int | None = None
    walker: str = "cpu"

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("kv_cache_tokens", self.kv_cache_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")


def runner_info(config: EngineConfig, options: RuntimeOptions) -> RunnerInfo:
    """Limits and pool sizes of an engine; page 0 and slot 0 of every pool are reserved."""
    limits, plan = config.build, config.memory()
    num_pages = plan.num_pages
    if options.kv_cache_tokens is not None:
        num_pages = dict.fromkeys(num_pages, 1 - (-options.kv_cache_tokens // limits.tokens_per_block))
    return RunnerInfo(
        vocab_size=config.model.vocab_size,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        page_size=limits.tokens_per_block,
        num_pages=num_pages,
        num_slots=plan.num_slots,
        caches=tuple(config.model.caches()),
        eos_token_ids=config.model.eos_token_ids,
        pad_token_id=config.model.pad_token_id,
    )


def load_runner(engine_dir: str | Path, options: RuntimeOptions | None = None) -> Runner:
    """Open an engine. Raises `ValueError` with one clear line if it is damaged or built by another version."""
    engine_dir, options = Path(engine_dir), options or RuntimeOptions()
    config = read_engine_config(engine_dir)
    program = build_program(config.model)
    try:
        stored = open_weights(engine_dir / ENGINE_FILE, config.model)
    except ValueError as error:
        raise ValueError(f"{engine_dir}: {error}; build the engine again") from None
    weights = {name: stored.get_tensor(name) for name in program.weights}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return TorchRunner(program, weights, runner_info(config, options), options.walker)
