"""Small engines and requests of all kinds, for property tests of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import tokenizers
from hypothesis import strategies as st
from null_runner import null_info
from tokenizers import decoders, models

from hybridtrt.build.stored_tokenizer import StoredTokenizer, TokenizerSettings
from hybridtrt.plugins.caches import pages_held
from hybridtrt.runtime.engine import EngineOptions
from hybridtrt.runtime.profile import GroupBytes, Profile, RangeProfile, StepProfile
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.tokenizer import Tokenizer

PIECES = ("a", "b", "ab", "d", "ca", "e", "ddb", " f")  # the text of each token
VOCAB, PAGE_SIZE, LONGEST = len(PIECES), 4, 40


@cache
def tokenizer() -> Tokenizer:
    """The tokens are the `PIECES`."""
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(StoredTokenizer(backend, TokenizerSettings()))


@dataclass(frozen=True)
class SmallEngine:
    """An engine whose pools hold one sequence of the greatest length and `spare` pages a group.

    `optimistic`: by its profile requests hold no more than their prompts, so that many are preempted. What is preempted
    is swapped, if there is room, where a second passes for each token that is computed again.
    """

    groups: tuple[str, ...] = ("full",)
    windows: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    states: bool = True
    batch_size: int = 5
    num_tokens: int = 40
    num_slots: int = 12
    spare: int = 1
    optimistic: bool = True
    token_seconds: float = 1.0
    swap_bytes: int = 0
    reuse: bool = True
    draft_tokens: int = 0

    @property
    def info(self) -> RunnerInfo:
        num_pages = {}
        for group in self.groups:
            window, limit = self.windows.get(group), self.limits.get(group)
            num_pages[group] = 1 + self.spare + pages_held(LONGEST, PAGE_SIZE, window, limit, self.num_tokens)
        info = null_info(
            vocab_size=VOCAB,
            max_batch_size=self.batch_size,
            max_num_tokens=self.num_tokens,
            max_seq_len=LONGEST,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            num_slots=self.num_slots,
            states=self.states,
            windows=self.windows,
            limits=self.limits,
        )
        return replace(info, costs=self.profile.costs())

    @property
    def profile(self) -> Profile:
        return optimistic_profile(self.groups, self.token_seconds)

    def options(self, max_chunk: int | None, snapshot_interval: int, priority_seconds: float) -> EngineOptions:
        return EngineOptions(
            max_chunk=max_chunk,
            policy="max_utilization" if self.optimistic else "guaranteed_no_evict",
            swap_bytes=self.swap_bytes,
            enable_block_reuse=self.reuse,
            snapshot_interval=snapshot_interval,
            max_draft_tokens=self.draft_tokens,
            priority_seconds=priority_seconds,
            poison=True,
        )


def optimistic_profile(groups: Iterable[str], token_seconds: float) -> Profile:
    """A profile by which requests of up to 127 tokens hold next to nothing: only their prompts are expected."""
    nothing = tuple(GroupBytes(group, 1e-9) for group in groups)
    ranges = tuple(RangeProfile(2**i, 1, nothing, 0, 0, 0.0) for i in range(7))
    return Profile(1, "", ranges, (), (StepProfile(1, token_seconds, None),), 1e9)


def _params(max_tokens: int, least: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens, min(least, max_tokens), **others)


PARAMS = st.builds(
    _params,
    max_tokens=st.sampled_from([1, 2, 6, 12, 20]),
    least=st.sampled_from([0, 0, 1, 4]),
    temperature=st.sampled_from([None, None, 0.7, 2.0]),
    top_k=st.sampled_from([None, 3]),
    top_p=st.sampled_from([None, 0.9]),
    min_p=st.sampled_from([None, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    logit_bias=st.sampled_from([(), (), ((3, 9.0),), ((1, 4.0), (2, 4.0))]),
    bad_token_ids=st.sampled_from([(), (), ((3, 3, 3),)]),
    seed=st.integers(0, 2**64 - 1),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stop_token_ids=st.sampled_from([(), (), (7,), (2, 6)]),
    stop_words=st.sampled_from([(), (), ("bab",), ("ab", "ba"), ("dd", "cad"), ("d" * 8,)]),
    return_log_probs=st.booleans(),
    top_log_probs=st.sampled_from([0, 0, 2]),
    prompt_log_probs=st.sampled_from([None, None, None, 0, 2]),
    stream_interval=st.sampled_from([1, 1, 3, 50]),
)

STEMS = [(1, 2, 3, 4, 5, 6, 7, 0) * 2, (1, 2, 3, 4, 4, 3, 2, 1) * 2, (5,) * 16]

PROMPTS = st.builds(
    lambda stem, cut, tail: (*stem[:cut], *tail),
    st.sampled_from(STEMS),
    st.integers(0, 16),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
)

REQUESTS = st.builds(
    Request,
    id=st.just(""),
    prompt_ids=PROMPTS,
    params=PARAMS,
    priority=st.sampled_from([0.5, 0.5, 0.1, 1.0]),
    allotted_time_ms=st.sampled_from([None, None, None, 1, 150]),
    cache_salt=st.sampled_from(["", "", "other"]),
)
