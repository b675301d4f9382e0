"""The Triton model repository: the templates in `models/`, filled in."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

TEMPLATES = Path(__file__).parent / "models"
MODELS = ("ensemble", "tensorrt_llm")
CONFIG = "config.pbtxt"


@dataclass(frozen=True)
class ModelSettings:
    """The keys of the templates."""

    engine_socket: str
    sender_threads: int = 4
    cancellation_check_period_ms: int = 50
    stats_check_period_ms: int = 250


def write_repository(folder: Path, settings: ModelSettings) -> None:
    """Write the models into a folder, in place of what an earlier call wrote.

    Raises:
        ValueError: a template has a key that is no setting.
    """
    for model in MODELS:
        target = folder / model
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(TEMPLATES / model, target, ignore=shutil.ignore_patterns("__pycache__"))
        config = target / CONFIG
        config.write_text(fill(config.read_text("utf-8"), settings, f"{model}/{CONFIG}"), "utf-8")


def fill(template: str, settings: ModelSettings, where: str) -> str:
    """The template with every `${key}` replaced, quoted for protobuf's text format."""
    values = {key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in asdict(settings).items()}
    try:
        return Template(template).substitute(values)
    except KeyError as error:
        raise ValueError(f"{where} has an unknown key {error}; known: {', '.join(values)}") from None
