"""The canonical checkpoint folder, in TensorRT-LLM's layout: `config.json`, `rank0.safetensors`, `tokenizer/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridtrt
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.safetensors_file import DTYPES, Layout, open_safetensors

if TYPE_CHECKING:
    import torch

PRODUCER = "hybridtrt"
FORMAT = 1  # raised whenever an older reader would misread a checkpoint
CONFIG = "config.json"
WEIGHTS = "rank0.safetensors"
TOKENIZER = "tokenizer"


def weight_layouts(config: ModelConfig) -> dict[str, Layout]:
    """How each weight of the network is stored."""
    return {
        name: Layout(spec.shape, "float32" if spec.full_precision else config.dtype)
        for name, spec in config.weight_table().items()
    }


def checkpoint_config(config: ModelConfig) -> dict[str, Any]:
    """The contents of `config.json`: TensorRT-LLM's fields, then the canonical description of the model."""
    return {
        "producer": {"name": PRODUCER, "version": hybridtrt.__version__},
        "format": FORMAT,
        "architecture": config.architecture,
        "dtype": config.dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.layers),
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.norm_eps,
        "layer_types": [layer.mixer_names() for layer in config.layers],
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "model": config.to_dict(),
    }


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of this project, of whatever format."""
    try:
        producer = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["producer"]["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(producer == PRODUCER)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; its weights are mapped when the first is asked for."""

    path: Path
    config: ModelConfig

    @property
    def tokenizer_dir(self) -> Path | None:
        """The folder of the tokenizer's files, if there are any."""
        folder = self.path / TOKENIZER
        return folder if folder.is_dir() else None

    def tensor(self, name: str) -> torch.Tensor:
        """One weight, as a view of the mapped file. `name` is one of `config.weight_table()`."""
        tensor: torch.Tensor = self._weights.get_tensor(name)
        return tensor

    @cached_property
    def _weights(self) -> Any:
        return open_safetensors(self.path / WEIGHTS, "pt")


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint and check that its weights are those of its config.

    Raises `ValueError` for a folder that is damaged, comes from elsewhere or has another format.
    """
    folder = Path(folder)
    data = HFConfig.load(folder / CONFIG).values
    if not is_checkpoint(folder):
        raise ValueError(f"{folder}: is not a checkpoint of {PRODUCER} (config.json names another producer or none)")
    if data.get("format") != FORMAT:
        raise ValueError(f"{folder}: has checkpoint format {data.get('format')!r}, expected {FORMAT}; convert it again")
    try:
        config = ModelConfig.from_dict(data["model"] if isinstance(data.get("model"), dict) else {})
        _check_agreement(data, checkpoint_config(config) | {"producer": data["producer"]})
        _check_weights(folder / WEIGHTS, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Checkpoint(folder, config)


def _check_agreement(data: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key in sorted((data.keys() | expected.keys()) - {"model"}):
        if key not in data or key not in expected or data[key] != expected[key]:
            raise ValueError(f"{key}={data.get(key)!r} in {CONFIG}, expected {expected.get(key)!r} by its `model`")


def _check_weights(path: Path, config: ModelConfig) -> None:
    """Raise `ValueError` if the file is damaged or its names, shapes and dtypes are not those of the network."""
    weights = open_safetensors(path)
    layouts = weight_layouts(config)
    stored = set(weights.keys())
    if stored != set(layouts):
        wrong = sorted(stored ^ set(layouts))[0]
        raise ValueError(f"{path.name} has {'a surplus' if wrong in stored else 'no'} weight {wrong}")
    for name, layout in layouts.items():
        entry = weights.get_slice(name)
        if (tuple(entry.get_shape()), entry.get_dtype()) != (layout.shape, DTYPES[layout.dtype]):
            raise ValueError(
                f"{path.name} has {name} as {entry.get_dtype()} {entry.get_shape()}, "
                f"expected {DTYPES[layout.dtype]} {list(layout.shape)}"
            )
