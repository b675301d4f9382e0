"""What a request is expected to hold: between its prompt and the worst case, from a profile where there is one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_runner import null_info

from hybridtrt.plugins.caches import PageSpec, pages_held
from hybridtrt.runtime.admission import Admission
from hybridtrt.runtime.profile import FORMAT, GroupBytes, Profile, RangeProfile, StepProfile
from hybridtrt.runtime.runner import RunnerInfo

CACHES = (
    PageSpec("layers.0.kv", "full", (2,)),  # 8 bytes a token
    PageSpec("layers.1.kv", "full", (1,)),  # 4
    PageSpec("layers.2.kv", "window", (2,), window=9),
    PageSpec("layers.3.kv", "head", (2,), limit=6),
)
FULL_PAGE_BYTES = 12 * 4


def info() -> RunnerInfo:
    known = null_info(page_size=4, max_num_tokens=8, max_seq_len=4096, num_pages={"full": 9, "window": 9, "head": 9})
    return RunnerInfo(**vars(known) | {"caches": CACHES})


def profile(least: int, bytes_per_token: float, group: str = "full") -> Profile:
    part = RangeProfile(least, 1, (GroupBytes(group, bytes_per_token),), 0, 0, 0.1)
    return Profile(FORMAT, "", (part,), (), (StepProfile(1, 0.1, None),), 1e9)


lengths = st.integers(1, 2000)
rates = st.none() | st.builds(profile, st.integers(0, 11).map(lambda bits: 1 << bits), st.floats(1e-6, 50))


@given(lengths, lengths, rates, st.sampled_from(["full", "window", "head"]))
def test_an_expectation_lies_between_the_prompt_and_the_worst_case(
    prompt: int, max_tokens: int, measured: Profile | None, group: str
) -> None:
    kept = {spec.group: (spec.window, spec.limit) for spec in CACHES}[group]
    worst = pages_held(prompt + max_tokens - 1, 4, *kept, 8)
    least = min(pages_held(prompt, 4, *kept, 8) + 1, worst)
    assert least <= Admission(info(), measured).expected_pages(group, prompt, max_tokens) <= worst


@pytest.mark.parametrize(
    ("group", "prompt", "max_tokens", "expected"),
    [
        ("full", 100, 100, 38),  # 150 tokens
        ("full", 100, 101, 38),  # 151: half an odd output rounds up
        ("full", 100, 1, 25),  # the worst case: the only token of the output is never cached
        ("full", 100, 2, 26),
        ("window", 1, 2, 1),
        ("window", 1, 100, 5),  # a ring of 9 - 2 + 8 tokens, 4 pages and one that is cut in the middle
        ("head", 100, 100, 2),  # 6 tokens are kept
    ],
)
def test_without_a_profile_half_the_output_counts(group: str, prompt: int, max_tokens: int, expected: int) -> None:
    assert Admission(info()).expected_pages(group, prompt, max_tokens) == expected


@given(st.integers(1, 63), st.integers(1, 11))
def test_a_profile_counts_with_a_margin_in_its_range_only(prompt: int, bits: int) -> None:
    """7.2 bytes a token are 0.6 of the 12 that every token would hold."""
    max_tokens = (1 << bits) - 1
    total = prompt + max_tokens
    measured = Admission(info(), profile(512, 7.2)).expected_pages("full", prompt, max_tokens)
    analytic = Admission(info()).expected_pages("full", prompt, max_tokens)
    if 512 <= total < 1024:
        assert measured == max(math.ceil(total * 7.2 * 1.1 / FULL_PAGE_BYTES), -(-prompt // 4) + 1)
        assert measured > analytic
    else:
        assert measured == analytic


def test_a_profile_of_other_page_groups_changes_nothing() -> None:
    other = Admission(info(), profile(512, 1.0, "gone"))
    assert other.expected_pages("full", 100, 500) == Admission(info()).expected_pages("full", 100, 500)
