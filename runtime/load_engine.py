"""From an engine folder to an engine that takes requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.profile import read_profile
from hybridtrt.runtime.run_options import RunOptions
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.tokenizer import load_tokenizer


def load_engine(
    engine_dir: str | Path,
    options: RunOptions | None = None,
    make_runner: Callable[[Path], Runner] | None = None,
) -> Engine:
    """The engine in a folder, with its tokenizer and profile if it has them.

    `make_runner` is called with the folder instead of loading the engine's own runner.

    Raises:
        ValueError: the engine, the tokenizer or an option is no good.
    """
    engine_dir, options = Path(engine_dir), options or RunOptions()
    runtime_options, engine_options = options.select(RuntimeOptions), options.select(EngineOptions)
    runner = load_runner(engine_dir, runtime_options) if make_runner is None else make_runner(engine_dir)
    return Engine(runner, load_tokenizer(engine_dir), engine_options, read_profile(engine_dir))
