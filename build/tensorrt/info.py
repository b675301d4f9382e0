"""What an engine's `config.json` says about its TensorRT engine, and loading checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TensorRTInfo:
    """What was built: the module, its version, the output that is each cache, and the size of the engine's file.

    Where the weights are inputs, `checkpoint` is the folder that they come from, and `checksums` has the CRC-32 of
    each weight there.
    """

    module: str
    version: str
    cache_outputs: Mapping[str, str]
    engine_bytes: int
    checkpoint: str | None = None
    checksums: Mapping[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> TensorRTInfo:
        """Raises `ValueError` for anything that `to_dict` did not write."""
        try:
            info = cls(**data)
            texts = (
                info.module,
                info.version,
                *info.cache_outputs,
                *info.cache_outputs.values(),
                info.checkpoint or "",
            )
            numbers = [info.engine_bytes, *({} if info.checksums is None else info.checksums).values()]
            whole = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        except (TypeError, AttributeError):
            whole = False
        if not whole:
            raise ValueError('the description of the TensorRT engine is damaged ("tensorrt"); build the engine again')
        if (info.checkpoint is None) != (info.checksums is None):
            raise ValueError("the description of the TensorRT engine has a checkpoint or checksums alone")
        return info
