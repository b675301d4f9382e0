"""The step contract: one ragged, token-major batch that mixes prefill chunks and decode tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the kernels' benchmark runs where torch came without numpy
    import numpy as np
    from numpy.typing import NDArray

Int32: TypeAlias = "NDArray[np.int32]"
MOST_TOKEN_SLOTS = 16  # tokens of the longest row in which states may be asked for


@dataclass(frozen=True)
class StepBatch:
    """What one step runs: `B` sequences with `T` tokens in all, of which `R` want logits. All arrays are int32.

    Row `b` owns tokens `cu_seqlens[b]:cu_seqlens[b + 1]`; `context_lens[b]` tokens of it are in the caches already,
    so its first token has position `context_lens[b]`. Its recurrent states are read from slot `state_src[b]` and
    written to slot `state_dst[b]`. `block_tables[group][b]` lists its pages, filled up with page 0.

    `token_slots` asks for states inside short rows, of at most 16 tokens: that after token `t` is written to slot
    `token_slots[t]`, too, where that is not 0. No other row reads or writes that slot, and no other token does. Raises
    `ValueError` where it has not a slot a token, or asks in a longer row.
    """

    input_ids: Int32  # [T]
    positions: Int32  # [T]
    cu_seqlens: Int32  # [B + 1]
    context_lens: Int32  # [B]
    state_src: Int32  # [B]
    state_dst: Int32  # [B]
    logits_indices: Int32  # [R], each a token index in 0..T-1
    block_tables: Mapping[str, Int32] = field(default_factory=dict)  # group -> [B, P]
    token_slots: Int32 | None = None  # [T]

    def __post_init__(self) -> None:
        if self.token_slots is None:
            return
        if len(self.token_slots) != self.num_tokens:
            raise ValueError(f"token_slots has {len(self.token_slots)} slots in a step of {self.num_tokens} tokens")
        for start, end in pairwise(self.cu_seqlens.tolist()):
            if end - start > MOST_TOKEN_SLOTS and self.token_slots[start:end].any():
                raise ValueError(
                    f"token_slots asks for states in a row of {end - start} tokens; {MOST_TOKEN_SLOTS} at most have any"
                )

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
