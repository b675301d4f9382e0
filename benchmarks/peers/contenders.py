"""The engines that compare.py runs: how each is made ready for a model and started."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from processes import Worker, run_quietly

import hybridtrt
from hybridtrt.build.build import build, default_build_config
from hybridtrt.build.engine import read_engine_config
from hybridtrt.build.timing_cache import TimingCache
from hybridtrt.build.tuning import Tuner
from hybridtrt.converters.convert import convert
from hybridtrt.runtime.load import open_packed

log = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
OURS = "hybridtrt"
# llama.cpp's names of the precisions. It rounds activations to bfloat16 too, ours does where it is asked to.
GGUF = {"float32": "f32", "bfloat16": "bf16", "bfloat16_rounded": "bf16", "int8": "q8_0"}
WEIGHTS = tuple(GGUF)


@dataclass(frozen=True)
class Setup:
    """What a run has: folders, threads, and which walker of ours runs."""

    cache: Path  # engines and GGUF files, made once
    threads: int
    weights: str
    limits: dict[str, int]  # of the engine that is built
    llama: Path | None = None  # the folder of build_llama.sh
    vllm_python: str | None = None  # an interpreter that has vLLM
    walker: str = "cpu"
    rebuild: bool = False


Start = Callable[[Path, Setup], Worker]


def our_engine(model: Path, setup: Setup) -> Path:
    """The engine's folder; converts, builds and tunes if there is none of this model, these limits and this version."""
    words = (str(model.resolve()), setup.weights, setup.threads, sorted(setup.limits.items()))
    folder = setup.cache / f"{model.name}-{setup.weights}-{hashlib.sha256(repr(words).encode()).hexdigest()[:8]}"
    if setup.rebuild or not _loads(folder / "engine"):
        convert(model, folder / "checkpoint")
        weights, rounded = setup.weights.removesuffix("_rounded"), setup.weights.endswith("_rounded")
        limits = replace(default_build_config(folder / "checkpoint"), weights=weights, **setup.limits)
        limits = replace(limits, activations="bfloat16" if rounded else None)
        tuner = Tuner(setup.threads, 10, TimingCache(setup.cache / "timing.json"), log.info)
        build(folder / "checkpoint", folder / "engine", limits, tune=tuner)
    return folder / "engine"


def start_ours(model: Path, setup: Setup) -> Worker:
    """Our engine by the walker that the setup names."""
    engine = our_engine(model, setup)
    command = [sys.executable, HERE / "hybridtrt_worker.py", engine, setup.threads, setup.walker]
    return Worker([str(word) for word in command], setup.threads)


def start_llama(model: Path, setup: Setup) -> Worker:
    """Convert to GGUF if there is none yet."""
    if setup.llama is None:
        raise ValueError("llama.cpp needs the folder of build_llama.sh")
    kind = GGUF[setup.weights]
    gguf = setup.cache / f"{model.name}.{kind}.gguf"
    if not gguf.is_file():
        partial = gguf.with_suffix(".tmp")
        gguf.parent.mkdir(parents=True, exist_ok=True)
        run_quietly([sys.executable, HERE / "llama_convert.py", setup.llama / "source", model, partial, kind])
        partial.rename(gguf)
    return Worker([str(setup.llama / "llama_worker"), str(gguf), str(setup.threads)], setup.threads)


def start_transformers(model: Path, setup: Setup) -> Worker:
    """Float32 from the same checkpoint, whatever the others have."""
    return Worker([sys.executable, str(HERE / "transformers_worker.py"), str(model), str(setup.threads)], setup.threads)


def start_vllm(model: Path, setup: Setup) -> Worker:
    """In the dtype asked; it has no int8 that compares. Its interpreter need not have hybridtrt."""
    python = setup.vllm_python or sys.executable
    dtype = setup.weights.removesuffix("_rounded")
    command = [python, str(HERE / "vllm_worker.py"), str(model), str(setup.threads), dtype]
    return Worker(command, setup.threads, {"PYTHONPATH": str(Path(hybridtrt.__file__).parent.parent)})


PEERS: dict[str, Start] = {"llama.cpp": start_llama, "transformers": start_transformers, "vllm": start_vllm}


def available(setup: Setup) -> list[str]:
    """The peers that this machine has and that compare at these weights."""
    found = ["transformers"]
    if setup.llama is not None:
        found.insert(0, "llama.cpp")
    if setup.weights != "int8" and (setup.vllm_python or importlib.util.find_spec("vllm")):
        found.append("vllm")
    return found


def _loads(engine: Path) -> bool:
    try:
        open_packed(engine, read_engine_config(engine))
    except (ValueError, OSError):
        return False
    return True
