"""The sample load, what its requests hold by arithmetic, and the profile of a real engine on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engines import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import NullRunner, null_info

from hybridtrt.cli import main
from hybridtrt.converters.plain_data import to_plain
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.profile import read_profile
from hybridtrt.runtime.profiler import SampleLoad, profile_ranges
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.step_profiler import StepProfiler, doublings, touch_pools

NO_REUSE = EngineOptions(enable_block_reuse=False)


@given(st.integers(3, 5000), st.integers(16, 40), st.integers(0, 9))
def test_a_sample_covers_every_range_below_the_longest_sequence(longest: int, requests: int, seed: int) -> None:
    sample = SampleLoad(requests, seed=seed).sample(null_info(max_seq_len=longest))
    totals = [len(request.prompt_ids) + request.params.max_tokens for request in sample]
    assert len({request.id for request in sample}) == requests
    assert all(request.prompt_ids and request.params.max_tokens > 0 for request in sample)
    assert max(totals) <= longest
    bits = {total.bit_length() for total in totals}
    longest_bits = (longest - 1).bit_length()
    assert bits == set(range(6, longest_bits + 1)) if longest > 32 else bits <= set(range(2, longest_bits + 1))
    assert sample == SampleLoad(requests, seed=seed).sample(null_info(max_seq_len=longest))


@pytest.mark.parametrize(
    ("load", "longest", "message"),
    [
        (SampleLoad(2, (16, 32, 8)), 64, "requests=2 is less than one for each of 3 ranges"),
        (SampleLoad(0, (16,)), 64, "requests=0 is less than one for each of 1 ranges"),
        (SampleLoad(9, (24,)), 64, "range 24 is not a power of two in 2..63"),
        (SampleLoad(9, (64,)), 64, "range 64 is not a power of two in 2..63"),
        (SampleLoad(9), 2, "max_seq_len=2 of the engine is too short for a sample load"),
    ],
)
def test_a_load_that_does_not_fit_is_refused(load: SampleLoad, longest: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load.sample(null_info(max_seq_len=longest))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(2, 24)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([1, 4]),
)
def test_bytes_held_are_those_of_arithmetic(lengths: list[tuple[int, int]], batch: int, page_size: int) -> None:
    """After step k of m, with the prompt in one chunk, a request of p tokens has p + k - 1 in its pages."""
    info = null_info(
        max_batch_size=batch, page_size=page_size, num_pages={"full": 300}, num_slots=batch + 1, max_num_tokens=32
    )
    requests = [
        Request(f"{i}", tuple(range(i, i + prompt)), SamplingParams(max_tokens=output, ignore_eos=True))
        for i, (prompt, output) in enumerate(lengths)
    ]
    expected: dict[int, list[float]] = {}
    for prompt, output in lengths:
        total = prompt + output
        sums = expected.setdefault(1 << (total.bit_length() - 1), [0, 0, 0])
        sums[0] += 1
        sums[1] += sum(-(-(prompt + step - 1) // page_size) * page_size * 4 for step in range(1, output))
        sums[2] += total * (output - 1)
    ranges = list(profile_ranges(Engine(NullRunner(info), options=NO_REUSE), requests))
    assert [part.least for part in ranges] == sorted(expected)
    for part in ranges:
        requests_of_range, held, asked = expected[part.least]
        assert part.requests == requests_of_range
        assert part.pages[0].bytes_per_token == pytest.approx(held / asked)
        assert part.state_bytes == 4
        assert part.time_to_first_token > 0


def test_a_request_that_fails_ends_the_profile() -> None:
    engine = Engine(NullRunner(null_info(), nan_token=7), options=NO_REUSE)
    with pytest.raises(ValueError, match="bad: FloatingPointError"):
        list(profile_ranges(engine, [Request("bad", (7, 8), SamplingParams(max_tokens=4))]))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(6, 70), st.integers(4, 64), st.integers(1, 9), st.integers(2, 40), st.integers(1, 60)
)
def test_measured_steps_keep_the_contract(
    batch: int, tokens: int, longest: int, page_size: int, window: int, limit: int
) -> None:
    """The runner checks each batch; pages that a window has left or a limit never had are not in its tables."""
    info = null_info(
        max_batch_size=batch,
        max_num_tokens=tokens,
        max_seq_len=longest,
        page_size=page_size,
        num_pages=dict.fromkeys(("full", "window", "head"), 1 + batch * -(-longest // page_size)),
        num_slots=batch + 1,
        windows={"window": window},
        limits={"head": limit},
    )
    steps = StepProfiler(NullRunner(info))
    touch_pools(NullRunner(info), info)
    assert [step.tokens for step in steps.decode()] == list(doublings(batch))
    assert [step.tokens for step in steps.prefill()] == list(doublings(min(tokens, longest)))
    assert steps.copy_bytes_per_s() > 0


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_doublings(most: int, counts: list[int]) -> None:
    assert list(doublings(most)) == counts


def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = shutil.copytree(tiny_engine("granitemoehybrid"), tmp_path / "engine")
    options = ["--requests", "5", "--ranges", "16,64"]
    assert main(["profile", str(engine), *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    profile = read_profile(engine)
    assert profile is not None
    assert to_plain(profile) == shown
    assert [part.requests for part in profile.ranges] == [3, 2]
    assert all(0 < pages.bytes_per_token < 10**5 for part in profile.ranges for pages in part.pages)
    counts = [step.active_experts for step in (*profile.decode, *profile.prefill)]
    top_k, experts = 2, 4
    assert counts[0] == top_k
    assert all(top_k <= count <= experts for count in counts if count is not None)
    assert profile.prefill[-1].active_experts == experts
    assert main(["profile", str(engine), *options]) == 0
    page = capsys.readouterr().out
    assert "16..31" in page
    assert "64..127" in page


def test_a_bad_range_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tiny_engine("granitemoehybrid")), "--ranges", "48"]) == 1
    assert capsys.readouterr().err.endswith(
        "error: range 48 is not a power of two in 2..255 (max_seq_len of the engine)\n"
    )
