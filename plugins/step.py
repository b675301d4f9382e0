"""The step contract: one ragged, token-major batch that mixes prefill chunks and decode tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the kernels' benchmark runs where torch came without numpy
    import numpy as np
    from numpy.typing import NDArray

Int32: TypeAlias = "NDArray[np.int32]"


@dataclass(frozen=True)
class StepBatch:
    """What one step runs: `B` sequences with `T` tokens in all, of which `R` want logits. All arrays are int32.

    Row `b` owns tokens `cu_seqlens[b]:cu_seqlens[b + 1]`; `context_lens[b]` tokens of it are in the caches already,
    so its first token has position `context_lens[b]`. Its recurrent states are read from slot `state_src[b]` and
    written to slot `state_dst[b]`. `block_tables[group][b]` lists its pages, filled up with page 0.
    """

    input_ids: Int32  # [T]
    positions: Int32  # [T]
    cu_seqlens: Int32  # [B + 1]
    context_lens: Int32  # [B]
    state_src: Int32  # [B]
    state_dst: Int32  # [B]
    logits_indices: Int32  # [R], each a token index in 0..T-1
    block_tables: Mapping[str, Int32] = field(default_factory=dict)  # group -> [B, P]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


STEP_INPUTS = (
    "input_ids",
    "positions",
    "cu_seqlens",
    "context_lens",
    "block_tables",
    "state_src",
    "state_dst",
    "logits_indices",
)
