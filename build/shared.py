"""Values computed once a step that several layers read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shared:
    """`ropes` are cos and sin of each rotary table; `embeddings` the scaled token embeddings `[T, hidden]`."""

    ropes: tuple[tuple[str, str], ...]
    embeddings: str
