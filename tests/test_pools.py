"""Pools against their plan: bytes in every family, growth of the process, dtypes and what these cost."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import pool_growth
import pytest
from engines import LIMITS, rebuilt_runner, relative_error, tiny_engine
from pool_growth import empty_runner

from hybridtrt.build.engine import EngineConfig, read_engine_config
from hybridtrt.converters.families import families
from hybridtrt.converters.memory import cache_memory
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import FLOPS_PER_THREAD, RuntimeOptions, runner_info

VARIANTS = sorted(name for name in checkpoints.TINY if checkpoints.model_type(name) in families())
HALF = {"bfloat16": 0.1, "float16": 0.1 / 8}  # by how much logits may move, of their standard deviation
IDS = np.random.default_rng(0).integers(0, 96, 40).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_pools_take_what_was_planned(variant: str, state_dtype: str, tmp_path: Path) -> None:
    """Byte for byte, in every family."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": checkpoints.model_type(variant), **checkpoints.SPECIAL_IDS, **checkpoints.TINY[variant]}
        )
    )
    limits = replace(LIMITS, max_num_tokens=40, state_dtype=state_dtype, kv_cache_dtype="bfloat16")
    config = EngineConfig(read_model_config(tmp_path), limits)
    runner, plan = empty_runner(config), config.memory()
    assert sum(pool.data.nbytes for own in runner._pages.values() for pool in own) == plan.page_bytes
    assert sum(pool.data.nbytes for pool in runner._states) == plan.state_bytes
    assert {group: len(own[0].data) for group, own in runner._pages.items()} == plan.num_pages


def test_pools_are_what_the_process_grows_by() -> None:
    """Within a hundredth, where the pools are large and everything else is small."""
    done = subprocess.run([sys.executable, "-P", pool_growth.__file__], capture_output=True, text=True, check=True)
    planned, grown = map(int, done.stdout.split())
    assert planned > 3e8
    assert abs(grown - planned) < planned / 100


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "variant", ["mamba", "mamba2", "qwen3_5_text", "olmo_hybrid.nope", "falcon_h1", "lfm2", "recurrent_gemma"]
)
def test_states_in_half_precision(variant: str, dtype: str) -> None:
    """Rounded after every step of 3 tokens to 8 or 11 bits; no model has experts, which a rounding could exchange."""
    runner = rebuilt_runner(variant, state_dtype=dtype)
    assert isinstance(runner, CpuRunner)
    assert {pool.dtype for pool in runner._states} == {dtype}
    assert {pool.dtype for own in runner._pages.values() for pool in own} <= {"float32"}
    moved = relative_error(full_logits(runner, IDS, 3), full_logits(rebuilt_runner(variant), IDS, 3))
    assert 0 < moved < HALF[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("variant", ["qwen3_5_text", "deepseek_v3.dense", "gemma3_text"])
def test_pages_in_half_precision(variant: str, dtype: str) -> None:
    runner = rebuilt_runner(variant, kv_cache_dtype=dtype)
    assert isinstance(runner, CpuRunner)
    assert {pool.dtype for own in runner._pages.values() for pool in own} == {dtype}
    assert {pool.dtype for pool in runner._states} <= {"float32"}
    moved = relative_error(full_logits(runner, IDS, 3), full_logits(rebuilt_runner(variant), IDS, 3))
    assert 0 < moved < HALF[dtype]


def test_pages_of_a_window_are_not_more_for_more_tokens() -> None:
    """What the tokens bound is full attention; of a window there are never more pages than a full batch takes."""
    config = read_engine_config(tiny_engine("gemma3_text"))
    config = replace(config, build=replace(config.build, max_num_tokens=8))
    assert config.memory().num_pages == {"full_attention": 1 + 8 * 16, "window_8": 1 + 8 * 2}
    for tokens, full, window in ((16, 1, 1), (160, 10, 10), (256, 16, 16), (9999, 625, 16)):
        info = runner_info(config, RuntimeOptions(kv_cache_tokens=tokens))
        assert info.num_pages == {"full_attention": 1 + full, "window_8": 1 + window}


def test_slots_of_snapshots_and_drafts() -> None:
    config = read_engine_config(tiny_engine("qwen3_next"))
    each = cache_memory(config.caches()).state_bytes
    for options, slots in (
        (RuntimeOptions(), 8 + 8),
        (RuntimeOptions(prefix_cache_bytes=0), 8),
        (RuntimeOptions(prefix_cache_bytes=3 * each - 1), 8 + 2),
        (RuntimeOptions(prefix_cache_bytes=3 * each), 8 + 3),
        (RuntimeOptions(enable_block_reuse=False), 8),
        (RuntimeOptions(max_draft_tokens=4), 8 + 8 + 8),
        (RuntimeOptions(enable_block_reuse=False, max_draft_tokens=1, prefix_cache_bytes=9 * each), 8 + 8),
    ):
        assert runner_info(config, options).num_slots == 1 + slots
    attention = read_engine_config(tiny_engine("gemma3_text"))
    assert runner_info(attention, RuntimeOptions(max_draft_tokens=4)).num_slots == 1


def test_costs_follow_the_operations_of_a_token() -> None:
    """A multiplication and an addition for each weight of a matrix at least, shared by the threads."""
    config = read_engine_config(tiny_engine("lfm2"))
    matrices = [s.shape for n, s in config.model.weight_table().items() if len(s.shape) == 2 and "embedding" not in n]
    least = sum(2 * rows * columns for rows, columns in matrices)
    one, two = (runner_info(config, RuntimeOptions(threads=n)).costs.seconds_per_token for n in (1, 2))
    assert 1.0 < one * FLOPS_PER_THREAD / least < 1.5
    assert one == 2 * two


@pytest.mark.parametrize("variant", ["gemma3_text", "gpt_oss", "recurrent_gemma", "hybridtrt_free_mix.own"])
def test_pages_of_a_ring_are_enough(variant: str) -> None:
    """A sequence of many windows in a pool of its ring, which is NaN at first: the logits of one with all its pages."""
    ids = np.random.default_rng(1).integers(0, 96, 100).tolist()
    expected = full_logits(rebuilt_runner(variant), ids)
    for chunk in (3, 16):
        runner = rebuilt_runner(variant, max_num_tokens=chunk, max_batch_size=1)
        held = {spec.group: spec for spec in runner.info.caches if isinstance(spec, PageSpec)}
        rings = [runner.info.num_pages[name] for name, spec in held.items() if spec.window is not None]
        assert rings
        assert all(ring <= 1 + 3 for ring in rings)
        runner.poison({group: range(count) for group, count in runner.info.num_pages.items()}, [])
        assert relative_error(full_logits(runner, ids), expected) < 1e-4
