"""Engines of the random checkpoints, and the oracle that judges them: transformers' full forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from hybridtrt.build.build import build
from hybridtrt.build.engine import BuildConfig, read_engine_config
from hybridtrt.converters.convert import convert
from hybridtrt.runtime.load import RuntimeOptions, make_runner, open_packed, runner_info
from hybridtrt.runtime.load_torch import unpacked
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.torch_runner import TorchRunner

LIMITS = BuildConfig(max_batch_size=8, max_num_tokens=256, max_seq_len=256, tokens_per_block=16)


def make_engine(model_dir: Path, limits: BuildConfig = LIMITS, dtype: str | None = None) -> Path:
    """Convert and build beside the model."""
    checkpoint = model_dir.with_name(f"{model_dir.name}-{dtype}-checkpoint")
    engine = model_dir.with_name(f"{model_dir.name}-{dtype}-engine")
    convert(model_dir, checkpoint, dtype)
    build(checkpoint, engine, limits)
    return engine


@cache
def tiny_engine(family: str) -> Path:
    """The engine of a tiny model, shared by all tests of a process."""
    return make_engine(checkpoints.tiny_checkpoint(family))


@cache
def tiny_text_engine(family: str) -> Path:
    """The engine of a tiny model with a tokenizer."""
    return make_engine(checkpoints.tiny_text_checkpoint(family))


@torch.inference_mode()
def oracle_logits(model: transformers.PreTrainedModel, ids: Sequence[int]) -> NDArray[np.float32]:
    """`[len(ids), vocab]` by transformers' full forward, without a cache."""
    logits: NDArray[np.float32] = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()
    return logits


def relative_error(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference over the standard deviation of the expected logits."""
    assert logits.shape == expected.shape
    return float(np.abs(logits - expected).max() / expected.std())


def typical_error(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference of a token's logits by their standard deviation, in the median token.

    Rounding may let the router choose another expert; the few tokens that it happens to say nothing of precision.
    """
    return float(np.median(np.abs(logits - expected).max(axis=1)) / expected.std())


def rebuilt_runner(variant: str, **build_config: Any) -> Runner:
    """The runner of a tiny engine as if it had been built with other caches and limits."""
    folder = tiny_engine(variant)
    config = read_engine_config(folder)
    config = replace(config, build=replace(config.build, **build_config))
    return make_runner(config, open_packed(folder, config), runner_info(config, RuntimeOptions()), RuntimeOptions())


def float64_runner(folder: Path) -> TorchRunner:
    """The runner of an engine that computes in float64."""
    config = read_engine_config(folder)
    weights = unpacked(config, open_packed(folder, config))
    return TorchRunner(*weights, runner_info(config, RuntimeOptions()), dtype=torch.float64)
