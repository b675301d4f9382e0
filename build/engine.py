"""The engine folder, in TensorRT-LLM's layout: `config.json`, one engine file a rank, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import hybridtrt
from hybridtrt.build.capacity import Capacity
from hybridtrt.build.lowering import LoweredProgram, StoredAs, lower
from hybridtrt.build.network import build_program
from hybridtrt.build.packed_file import stored_bytes
from hybridtrt.build.tactics import Tuned
from hybridtrt.build.targets import CPU, GROUP_SIZES, TARGETS, check_gpu_options, check_weights
from hybridtrt.build.tensorrt.info import TensorRTInfo
from hybridtrt.converters.config import DTYPES, ModelConfig
from hybridtrt.converters.memory import MemoryPlan, PoolLimits, cache_memory, plan_memory, stored_as
from hybridtrt.plugins.caches import CacheSpec
from hybridtrt.plugins.capacity import OVERFLOWS
from hybridtrt.plugins.program import Program

CONFIG_FILE = "config.json"
ENGINE_FILE = "rank0.engine"  # packed weights: packed_file.py
TOKENIZER = "tokenizer"
SPARE_LOGITS_ROWS = 256  # beside one a sequence: a row takes 4 bytes for every word of the vocabulary


@dataclass(frozen=True)
class BuildConfig:
    """Limits an engine is built for.

    `max_num_tokens` bounds the tokens of one step (prefill chunks and decode tokens together), `max_seq_len` prompt
    and output of one sequence, `max_batch_size` the sequences of one step; `tokens_per_block` is the page size.
    States are kept in `state_dtype` and pages in `kv_cache_dtype`; whatever these are, scans compute in float32.

    Matrices are stored as `weights` says: one of `WEIGHTS[target]`, or None for what the checkpoint has (float16 as
    float32), on a GPU for the dtype of the activations.
    int8 and int4 have a scale for every `group_size` numbers of an output, 0 for all of them. Matrices whose names
    match a pattern of `exclude` stay as the checkpoint has them, and so do embeddings, routers, norms, convolutions, A
    and dt always.

    `moe_capacity_factor` bounds the tokens that an expert takes in a step, and `moe_overflow` says what becomes of the
    others (`Capacity`); None: no bound, as the model was trained. With a bound results depend on the batch.

    A GPU target computes in `activations`, one of `ACTIVATIONS[target]`, for the GPUs of `compute_capabilities` (89 for
    8.9). The CPU computes in float32; with activations of bfloat16 it rounds what it multiplies bfloat16 matrices by.
    With `weights_as_inputs` its engine has no weights; they are read from the checkpoint when it is loaded.
    """

    target: str = CPU
    max_batch_size: int = 8
    max_num_tokens: int = 512
    max_seq_len: int = 2048
    tokens_per_block: int = 32
    state_dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    weights: str | None = None
    group_size: int | None = None
    exclude: tuple[str, ...] = ()
    moe_capacity_factor: float | None = None
    moe_overflow: str | None = None
    activations: str | None = None
    compute_capabilities: tuple[int, ...] = ()
    weights_as_inputs: bool = False

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target {self.target!r} is not known; known: {', '.join(TARGETS)}")
        if self.state_dtype not in DTYPES:
            raise ValueError(
                f"state_dtype={self.state_dtype!r} is not one of {', '.join(DTYPES)}: "
                "a state adds up every token, and in fewer bits the sum stands still"
            )
        if self.kv_cache_dtype not in DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not one of {', '.join(DTYPES)}")
        check_weights(self.target, self.weights, self.activations)
        object.__setattr__(self, "compute_capabilities", _without_repetition(self.compute_capabilities))
        check_gpu_options(self.target, self.compute_capabilities, self.weights, self.weights_as_inputs)
        if type(self.weights_as_inputs) is not bool:
            raise ValueError(f"weights_as_inputs={self.weights_as_inputs!r} is not true or false")
        sizes = GROUP_SIZES.get(self.weights or "", ())
        if self.group_size is not None and self.group_size not in sizes:
            known = f"one of {', '.join(map(str, sizes))}" if sizes else "int8 or int4 weights"
            raise ValueError(f"group_size={self.group_size} with weights={self.weights}: expected {known}")
        if self.group_size is None and sizes:
            object.__setattr__(self, "group_size", sizes[0])
        patterns: Any = self.exclude  # of a file, maybe
        if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"exclude={patterns!r} is not a list of patterns")
        object.__setattr__(self, "exclude", tuple(patterns))
        if self.moe_capacity_factor is None and self.moe_overflow is not None:
            raise ValueError(f"moe_overflow={self.moe_overflow!r} without moe_capacity_factor: no expert overflows")
        if self.capacity is not None:
            object.__setattr__(self, "moe_overflow", self.capacity.overflow)
        for name, value, most in (
            ("max_batch_size", self.max_batch_size, 4096),
            ("max_num_tokens", self.max_num_tokens, 1 << 20),
            ("max_seq_len", self.max_seq_len, 1 << 24),
            ("tokens_per_block", self.tokens_per_block, 4096),
        ):
            if type(value) is not int:
                raise ValueError(f"{name}={value} is not a whole number")
            if not 1 <= value <= most:
                raise ValueError(f"{name}={value} is not in 1..{most}")
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens={self.max_num_tokens} is less than max_batch_size={self.max_batch_size}: "
                "a step could not hold one token of every sequence"
            )

    def render(self) -> str:
        """What was chosen, as one line."""
        chosen = {name: value for name, value in asdict(self).items() if value is not False and value not in (None, ())}
        return ", ".join(f"{name} {_listed(value)}" for name, value in chosen.items())

    @property
    def changes_matrices(self) -> bool:
        """Whether matrices are stored or multiplied otherwise than the checkpoint's dtype has it."""
        if self.target == CPU:
            return self.weights is not None or self.activations == "bfloat16"
        return self.weights not in (None, self.activations)

    @property
    def max_logits_rows(self) -> int:
        """Tokens of a step that may want logits.

        The CPU takes memory for them as a step needs it. On a GPU they have a place: one row for each sequence, and
        some for drafts and for prompts that are scored.
        """
        if self.target == CPU:
            return self.max_num_tokens
        return min(self.max_num_tokens, self.max_batch_size + SPARE_LOGITS_ROWS)

    @property
    def capacity(self) -> Capacity | None:
        """The bound of the experts."""
        if self.moe_capacity_factor is None:
            return None
        return Capacity(self.moe_capacity_factor, self.moe_overflow or OVERFLOWS[0])


@dataclass(frozen=True)
class EngineConfig:
    """`config.json` of an engine: `{version, pretrained_config, build_config}`, and what the build found out.

    That is `tactics` where it was tuned for a CPU, and `tensorrt` of an engine for a GPU.
    """

    model: ModelConfig
    build: BuildConfig
    tuned: Tuned | None = None
    tensorrt: TensorRTInfo | None = None

    def caches(self) -> list[CacheSpec]:
        """The model's caches in the dtypes that the engine keeps them in."""
        return stored_as(self.model.caches(), self.build.kv_cache_dtype, self.build.state_dtype)

    def program(self) -> Program:
        """The network over these caches."""
        return build_program(self.model, self.caches(), self.build.capacity)

    def stored(self, name: str) -> StoredAs:
        """The format of a matrix in panels, by its name."""
        as_it_is = "float32" if name in self._precise or self.model.dtype != "bfloat16" else "bfloat16"
        excluded = name in self._precise or any(fnmatchcase(name, pattern) for pattern in self.build.exclude)
        form = as_it_is if self.build.weights is None or excluded else self.build.weights
        if form == self.build.activations == "bfloat16" and not excluded:
            return StoredAs("panel_bfloat16_rounded")
        return StoredAs(f"panel_{form}", 0 if excluded else self.build.group_size or 0)

    def lowered(self, keep: Collection[str] = ()) -> LoweredProgram:
        """The program as the C++ executor runs it; values in `keep` stay readable."""
        return lower(self.program(), self.stored, keep)

    @cached_property
    def _precise(self) -> frozenset[str]:
        """Weights that are stored in float32 whatever the dtype."""
        return frozenset(name for name, spec in self.model.weight_table().items() if spec.full_precision)

    def memory(self, spare_slots: int | None = None) -> MemoryPlan:
        """Pools in which a full batch of the longest sequences fits, and by default as many snapshots of prefixes."""
        limits = PoolLimits(
            max_batch_size=self.build.max_batch_size,
            max_seq_len=self.build.max_seq_len,
            max_num_tokens=self.build.max_num_tokens,
            tokens_per_block=self.build.tokens_per_block,
            spare_slots=self.build.max_batch_size if spare_slots is None else spare_slots,
        )
        return plan_memory(self.weight_bytes(), cache_memory(self.caches()), limits)

    def weight_bytes(self) -> int:
        """Bytes of all weights as they are stored."""
        if self.build.target == CPU:
            return sum(stored_bytes(weight) for weight in self.lowered().packed_weights().values())
        from hybridtrt.build.tensorrt.stored import weight_bytes  # takes an EngineConfig itself

        return sum(weight_bytes(self).values())

    def matrices(self) -> list[str]:
        """Names of the matrices whose format can be chosen."""
        if self.build.target != CPU:
            from hybridtrt.build.tensorrt.stored import quantizable

            return quantizable(self)
        packed = self.lowered().packed_weights().values()
        return [name for weight in packed if weight.stored.format.startswith("panel_") for name in weight.parts]

    def rounds_activations(self) -> bool:
        """Whether any matrix on the CPU is multiplied by activations of bfloat16."""
        packed = self.lowered().packed_weights().values()
        return any(weight.stored.format == "panel_bfloat16_rounded" for weight in packed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": hybridtrt.__version__,
            "pretrained_config": self.model.to_dict(),
            "build_config": asdict(self.build),
            **({} if self.tuned is None else {"tactics": self.tuned.to_dict()}),
            **({} if self.tensorrt is None else {"tensorrt": self.tensorrt.to_dict()}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: Path) -> EngineConfig:
        """Raises `ValueError` for an engine of another version or damaged data."""
        if not isinstance(data, dict) or not {"version", "pretrained_config", "build_config"} <= data.keys():
            raise ValueError(f"{where} is not an engine's: it lacks version, pretrained_config or build_config")
        if data["version"] != hybridtrt.__version__:
            raise ValueError(
                f"{where}: the engine was built by hybridtrt {data['version']}, this is {hybridtrt.__version__}; "
                "build it again from its checkpoint"
            )
        try:
            return cls(
                ModelConfig.from_dict(data["pretrained_config"]),
                BuildConfig(**data["build_config"]),
                Tuned.from_dict(data["tactics"]) if "tactics" in data else None,
                TensorRTInfo.from_dict(data["tensorrt"]) if "tensorrt" in data else None,
            )
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None


def _without_repetition(capabilities: Any) -> tuple[int, ...]:
    if not isinstance(capabilities, list | tuple) or not all(type(number) is int for number in capabilities):
        raise ValueError(f"compute_capabilities={capabilities!r} is not a list of whole numbers")
    return tuple(dict.fromkeys(capabilities))


def _listed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def is_engine(folder: Path) -> bool:
    """Whether the folder looks like an engine, of whatever version."""
    return (folder / CONFIG_FILE).is_file() and any(folder.glob("rank*.engine"))


def check_engine_file(folder: Path, config: EngineConfig) -> None:
    """Raise `ValueError` where the engine file is missing, or not as long as it was built for a GPU."""
    path = folder / ENGINE_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {ENGINE_FILE} in it; build the engine again")
    size = path.stat().st_size
    if config.tensorrt is not None and size != config.tensorrt.engine_bytes:
        raise ValueError(
            f"{path} has {size:,} bytes; built were {config.tensorrt.engine_bytes:,}: build the engine again"
        )


def read_engine_config(folder: Path) -> EngineConfig:
    """Read and check `config.json`. Raises `ValueError` with one clear line for anything that is not our engine."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not an engine: there is no {CONFIG_FILE} in it")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return EngineConfig.from_dict(data, path)
