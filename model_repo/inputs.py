"""The values of a request's tensors, checked. What this project cannot do is refused by name, never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[Any]]

# Inputs of TensorRT-LLM's models that would change the result or ask for an output that does not exist here,
# with the values that mean "off"; with anything else the request is refused.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "decoder_text_input": ("",),
    "draft_input_ids": (),
    "lora_config": (),
    "lora_task_id": (),
    "lora_weights": (),
    "prompt_embedding_table": (),
    "prompt_table_extra_id": (),
    "prompt_table_extra_ids": (),
    "prompt_vocab_size": (0,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "runtime_top_p_decay": (1.0,),
}

# Accepted and without effect: they only matter with beam search, with a decaying top-p or in padded output.
NO_EFFECT = frozenset(
    ("early_stopping", "len_penalty", "length_penalty", "pad_id", "runtime_top_p_min", "runtime_top_p_reset_ids")
)

# Triton turns JSON fields that are no input into request parameters. Of these only `id` and `timeout` are a client's.
_KNOWN_PARAMETERS = ("id", "binary_data_output", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout")


class RequestError(Exception):
    """What is wrong with a request, in one line for its client."""


class Inputs:
    """Typed access to the tensors of one request. Every method raises `RequestError` and names the input."""

    def __init__(
        self, tensors: Tensors, parameters: Mapping[str, object] | None = None, vocab_size: int | None = None
    ) -> None:
        self._tensors, self._parameters = tensors, parameters or {}
        self.vocab_size = vocab_size  # of the engine, where it is known
        for name in self._parameters:
            if name not in _KNOWN_PARAMETERS and not name.startswith("triton_"):
                raise RequestError(f"unknown input '{name}'")
        for name, neutral in UNSUPPORTED.items():
            for value in self._values(name):
                if value not in neutral:
                    allowed = " or ".join(map(repr, neutral)) or "leaving it out"
                    raise RequestError(f"{name}={_show(value)} is not supported, only {allowed}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def integer(self, name: str) -> int | None:
        value = self._single(name)
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        value = self._single(name)
        if value is not None and not math.isfinite(value):
            raise RequestError(f"{name}={value} is not a finite number")
        return None if value is None else float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._single(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        value: str | None = self._single(name)
        return value

    def allotted_time_ms(self) -> int | None:
        """The input of that name, or else Triton's own `timeout` of a request, in microseconds, where 0 is none."""
        timeout = self._parameters.get("timeout", 0)
        if not isinstance(timeout, int) or timeout < 0:
            raise RequestError(f"timeout={timeout!r} is not a number of microseconds")
        allotted = self.integer("allotted_time_ms")
        return math.ceil(timeout / 1000) if allotted is None and timeout else allotted

    def texts(self, name: str) -> tuple[str, ...]:
        """All strings of an input. Clients send "" for none."""
        return tuple(self._values(name))

    def ids(self, name: str) -> tuple[int, ...] | None:
        """A row of token ids."""
        return tuple(self._values(name)) if name in self._tensors else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """All numbers of an input."""
        values = tuple(map(float, self._values(name)))
        if not all(map(math.isfinite, values)):
            raise RequestError(f"{name} has a value that is not a finite number")
        return values

    def words(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Words as TensorRT-LLM has them, `[1, 2, n]`: their tokens end to end, and where each ends (-1: no more)."""
        values = self._values(name)
        tokens, ends = values[: len(values) // 2], [end for end in values[len(values) // 2 :] if end > 0]
        starts = [0, *ends][: len(ends)]
        if any(start >= end for start, end in zip(starts, ends, strict=True)) or max(ends, default=0) > len(tokens):
            raise RequestError(f"{name} has words that end at {ends}, expected growing places of at most {len(tokens)}")
        return tuple(tuple(tokens[start:end]) for start, end in zip(starts, ends, strict=True))

    def _single(self, name: str) -> Any:
        if name not in self._tensors:
            return None
        values = self._values(name)
        if len(values) != 1:
            raise RequestError(f"{name} has shape {list(self._tensors[name].shape)}, expected one value")
        return values[0]

    def _values(self, name: str) -> list[Any]:
        if name not in self._tensors:
            return []
        values: list[Any] = self._tensors[name].reshape(-1).tolist()
        try:
            return [value.decode() if isinstance(value, bytes) else value for value in values]
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def row(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """A tensor `[batch 1, ...]`."""
    return np.array([values], dtype)


def padded(
    rows: Sequence[Sequence[Any]], dtype: type[np.generic], fill: float, width: int | None = None
) -> NDArray[Any]:
    """A tensor `[batch 1, rows, longest]` of rows of unequal lengths, or with a `width` that of all their entries."""
    tail = () if width is None else (width,)
    tensor = np.full((1, len(rows), max(map(len, rows)), *tail), fill, dtype)
    for i, values in enumerate(rows):
        if values:
            tensor[0, i, : len(values)] = values
    return tensor
