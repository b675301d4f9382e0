"""From a checkpoint to an engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from hybridtrt.build.engine import CONFIG_FILE, ENGINE_FILE, TOKENIZER, BuildConfig, EngineConfig, is_engine
from hybridtrt.build.hf_tokenizer import read_tokenizer
from hybridtrt.build.packed_tensors import write_packed
from hybridtrt.build.tactics import Tuned
from hybridtrt.build.targets import ACTIVATIONS, COMPUTE_CAPABILITIES, CPU, GPU_TARGETS
from hybridtrt.converters.checkpoint import load_checkpoint
from hybridtrt.converters.ffns import MoeConfig
from hybridtrt.converters.replacing import replacing
from hybridtrt.converters.safetensors_writer import Progress

log = logging.getLogger("hybridtrt.build")


def default_build_config(checkpoint_dir: str | Path, target: str = CPU, activations: str | None = None) -> BuildConfig:
    """The defaults of a target, with `max_seq_len` no longer than the model's positions.

    On a GPU activations are float16 where the checkpoint is, else bfloat16, and KV pages are of their dtype.
    """
    model = load_checkpoint(checkpoint_dir).config
    config = BuildConfig(max_seq_len=min(BuildConfig.max_seq_len, model.max_length))
    if target not in GPU_TARGETS:
        return replace(config, target=target)
    known = ACTIVATIONS[target]
    activations = activations or (model.dtype if model.dtype in known else known[0])
    return replace(
        config,
        target=target,
        activations=activations,
        kv_cache_dtype=activations,
        compute_capabilities=() if target == "tensorrt" else COMPUTE_CAPABILITIES,
    )


def build(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    build_config: BuildConfig,
    progress: Progress = lambda done, total: None,
    tune: Callable[[EngineConfig, Path], Tuned | None] | None = None,
    stages: Callable[[str, int, int], None] = lambda what, done, total: None,
    gpu_cache: Path | None = None,
) -> EngineConfig:
    """Write the engine of a checkpoint to `out_dir` and return its config.

    `progress` is called with the bytes written and the bytes in all, `tune` (a `Tuner`) afterwards with the config and
    the file of weights. For a GPU, `stages` gets what is being done, the steps done and all; compiled kernels and
    timings are kept in `gpu_cache`. Raises `ValueError` for a checkpoint or limits that do not fit.
    """
    checkpoint_dir, out_dir = Path(checkpoint_dir), Path(out_dir).absolute()
    checkpoint = load_checkpoint(checkpoint_dir)
    positions = checkpoint.config.max_length
    if build_config.max_seq_len > positions:
        raise ValueError(f"max_seq_len={build_config.max_seq_len} exceeds the model's {positions} positions")
    experts = any(isinstance(branch, MoeConfig) for layer in checkpoint.config.layers for branch in layer.branches())
    if build_config.moe_capacity_factor is not None and not experts:
        raise ValueError(
            f"moe_capacity_factor={build_config.moe_capacity_factor}: there are no experts in {checkpoint_dir}"
        )
    config = EngineConfig(checkpoint.config, build_config)
    tokenizer = None if checkpoint.tokenizer_dir is None else read_tokenizer(checkpoint.tokenizer_dir)
    if checkpoint_dir.resolve().is_relative_to(out_dir.resolve()):
        raise ValueError(f"{out_dir}: holds the checkpoint itself ({checkpoint_dir})")
    _warn_of_patterns(config)
    if build_config.target == CPU and build_config.activations == "bfloat16" and not config.rounds_activations():
        raise ValueError(
            f"activations='bfloat16': no matrix of {checkpoint_dir} is bfloat16; expected weights='bfloat16'"
        )
    with replacing(out_dir, is_engine) as folder:
        if build_config.target == CPU:
            weights = config.lowered().packed_weights()
            write_packed(folder / ENGINE_FILE, weights, checkpoint.tensor, progress)
            if tune is not None:
                config = replace(config, tuned=tune(config, folder / ENGINE_FILE))
        else:
            from hybridtrt.build.tensorrt.target import write_engine  # here: TensorRT is not needed elsewhere

            config = replace(config, tensorrt=write_engine(folder, config, checkpoint, stages, gpu_cache))
        text = json.dumps(config.to_dict(), indent=2, allow_nan=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(folder / TOKENIZER)
    return config


def _warn_of_patterns(config: EngineConfig) -> None:
    """Of patterns of matrices to exclude that match none, or of any where no matrix would be changed."""
    if config.build.exclude and not config.build.changes_matrices:
        log.warning("exclude has no effect: without weights in another format all matrices stay as they are")
    matrices = config.matrices()
    for pattern in config.build.exclude:
        if not any(fnmatchcase(name, pattern) for name in matrices):
            log.warning("exclude pattern %r matches no matrix", pattern)
