"""How an engine is run, as a command line says it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hybridtrt.runtime.sizes import parse_size

T = TypeVar("T")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _option(description: str, kind: Callable[[str], Any] = int, name: str | None = None) -> Any:
    return field(default=None, metadata={"help": description, "type": kind, "name": name})


@dataclass(frozen=True)
class RunOptions:
    """Fields of `RuntimeOptions` and `EngineOptions`, by their names there; None leaves their defaults.

    Each is an option of the same name of every command that runs an engine.
    """

    threads: int | None = _option("compute threads")
    kv_cache_tokens: int | None = _option("tokens in the KV pages; by default a full batch fits")
    max_batch_size: int | None = _option("sequences that run at once; by default as many as the engine was built for")
    max_num_tokens: int | None = _option("tokens in one step; by default as many as the engine was built for")
    policy: str | None = _option(
        "guaranteed_no_evict (default): a request starts when all that it may need is reserved; max_utilization: when "
        "what it is expected to need is there, and others may be preempted",
        str,
    )
    swap_bytes: int | None = _option("room for what preempted requests have computed, such as 1GiB (0)", _size)
    enable_block_reuse: bool | None = _option("reuse what equal prefixes have computed (on)", bool, "prefix-cache")
    prefix_cache_bytes: int | None = _option(
        "snapshots of recurrent states in the prefix cache, such as 512MB; by default one for each sequence", _size
    )
    max_draft_tokens: int | None = _option("tokens a step to guess from repetitions in the text (0)")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """An option for each field."""
        for one in fields(cls):
            kind = one.metadata["type"]
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
            if kind is _size:
                how["metavar"] = "BYTES"
            parser.add_argument(_flag(one), dest=one.name, default=argparse.SUPPRESS, help=one.metadata["help"], **how)

    @classmethod
    def of(cls, args: argparse.Namespace) -> RunOptions:
        """The options that were given."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)})

    def arguments(self) -> list[str]:
        """A command line that gives these options."""
        words = []
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool):
                words.append(_flag(one) if value else _flag(one).replace("--", "--no-", 1))
            elif value is not None:
                words += [_flag(one), str(value)]
        return words

    def select(self, options: type[T]) -> T:
        """Of another class of options, its fields that were given here. Raises what that class raises."""
        names = {one.name for one in fields(options)}  # type: ignore[arg-type]
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name in names}
        return options(**{name: value for name, value in given.items() if value is not None})


def _flag(one: Any) -> str:
    name = one.metadata["name"] or one.name.replace("_", "-")
    return f"--{name}"
