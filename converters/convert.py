"""From a Hugging Face folder to a canonical checkpoint: one pass, weight by weight."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from hybridtrt.converters.checkpoint import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    checkpoint_config,
    is_checkpoint,
    weight_layouts,
)
from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.fp8 import Fp8Reader
from hybridtrt.converters.matching import match_sources, place_base_model
from hybridtrt.converters.model_reader import read_model
from hybridtrt.converters.origins import Origin, weight_origins
from hybridtrt.converters.replacing import replacing
from hybridtrt.converters.safetensors_writer import Progress, write_safetensors
from hybridtrt.converters.sources import Source

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def convert(
    model_dir: str | Path,
    out_dir: str | Path,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
) -> ModelConfig:
    """Write the checkpoint of the model in `model_dir` to `out_dir` and return its description.

    Matrices are stored in `dtype`, by default the dtype of the model; norms, routers and other sensitive weights in
    float32. An older checkpoint in `out_dir` is replaced, only once the new one is whole. `progress` is called with
    the bytes written and the bytes in all. Raises `ValueError` for anything that cannot be converted completely.
    """
    model_dir, out_dir = Path(model_dir), Path(out_dir).resolve()
    _check_folders(model_dir, out_dir)
    config, sources, reader = _prepare(model_dir, dtype)
    with replacing(out_dir, is_checkpoint) as folder:
        write_safetensors(
            folder / WEIGHTS, weight_layouts(config), lambda name: sources[name].pieces(reader.read_finite), progress
        )
        text = json.dumps(checkpoint_config(config), indent=2, allow_nan=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        _copy_tokenizer(model_dir, folder / TOKENIZER)
    return config


def dry_run(model_dir: str | Path, dtype: str | None = None) -> tuple[ModelConfig, list[Origin]]:
    """What `convert` would write: the description and the origin of every weight, checked in the same way.

    No weight is read but a head that must equal the embedding. Raises `ValueError` as `convert` does.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ValueError(f"{model_dir}: no such folder")
    config, sources, _ = _prepare(model_dir, dtype)
    return config, weight_origins(config, sources)


def _prepare(model_dir: Path, dtype: str | None) -> tuple[ModelConfig, dict[str, Source], CheckpointReader]:
    model = read_model(model_dir)
    reader = CheckpointReader(model_dir) if model.fp8 is None else Fp8Reader(model_dir, model.fp8)
    place_base_model(model, reader)
    sources = match_sources(model, reader)
    stored = model.dtype or reader.dtype(next(sources["embedding.weight"].tensors(()))[0])
    return replace(model.config, dtype=dtype or stored), sources, reader


def _check_folders(model_dir: Path, out_dir: Path) -> None:
    if not model_dir.is_dir():
        raise ValueError(f"{model_dir}: no such folder")
    if model_dir.resolve().is_relative_to(out_dir):
        raise ValueError(f"{out_dir}: holds the model itself ({model_dir})")


def _copy_tokenizer(model_dir: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (model_dir / name).is_file():
            target.mkdir(exist_ok=True)
            shutil.copyfile(model_dir / name, target / name)
