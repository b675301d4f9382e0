"""How an engine is run: options of command lines, and sizes."""

import argparse
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrt.runtime.engine import EngineOptions
from hybridtrt.runtime.load import RuntimeOptions
from hybridtrt.runtime.run_options import RunOptions
from hybridtrt.runtime.sizes import parse_size

VALUES = {
    "policy": st.sampled_from(("guaranteed_no_evict", "max_utilization")),
    "enable_block_reuse": st.booleans(),
    "threads": st.integers(1, 1024),
}
OPTIONS = st.builds(
    RunOptions, **{f.name: st.none() | VALUES.get(f.name, st.integers(1, 1 << 40)) for f in fields(RunOptions)}
)


def parsed(words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    RunOptions.add_arguments(parser)
    return RunOptions.of(parser.parse_args(words))


@given(OPTIONS)
def test_a_command_line_gives_the_options_that_it_was_made_of(options):
    assert parsed(options.arguments()) == options


def test_every_option_is_one_of_the_runner_or_of_the_engine():
    known = {field.name: field.default for cls in (RuntimeOptions, EngineOptions) for field in fields(cls)}
    options = RunOptions(**{field.name: object() for field in fields(RunOptions)})
    assert set(vars(options)) <= set(known)
    assert RunOptions().select(EngineOptions) == EngineOptions()
    assert RunOptions().select(RuntimeOptions) == RuntimeOptions()


@given(OPTIONS)
def test_options_go_where_they_belong(options):
    for cls in (RuntimeOptions, EngineOptions):
        selected = options.select(cls)
        for field in fields(cls):
            given_value = getattr(options, field.name, None)
            assert getattr(selected, field.name) == (field.default if given_value is None else given_value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), ("12B", 12), ("512MB", 512 * 10**6), ("512 mb", 512 * 10**6), ("1GiB", 1 << 30),
        ("1.5GiB", 3 << 29), ("3kB", 3000), ("3KiB", 3072), (" 2TB ", 2 * 10**12),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parsed(["--swap-bytes", text]).swap_bytes == size


@pytest.mark.parametrize("text", ["9" * 400, "4194304TiB"])
def test_a_size_beyond_any_memory_is_refused(text):
    with pytest.raises(ValueError, match="is more than memory can hold"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "B", "-1", "1e9", "1.GB", "5 bytes", "5GBs", "5 G B", "\u0661GB", "5GB\n6"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a size such as 4096, 512MB or 1\.5GiB"):
        parse_size(text)
    with pytest.raises(argparse.ArgumentError, match=r"--swap-bytes: .* is not a size such as"):
        parsed([f"--swap-bytes={text}"])
