"""The runners and what loads them: pools that are cleared and poisoned where they should, and steps by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import LIMITS, float64_runner, tiny_engine
from null_runner import null_info
from numpy.typing import NDArray

from hybridtrt.build.engine import BuildConfig, EngineConfig, read_engine_config
from hybridtrt.plugins.pointwise import vectorized as pointwise_kernels
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.forward import full_logits, prefill_steps
from hybridtrt.runtime.load import RuntimeOptions, load_runner, runner_info
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.torch_runner import TorchRunner

FAMILY = "qwen3_next"  # states and pages
IDS = np.random.default_rng(0).integers(0, 96, 40).tolist()


@pytest.fixture(params=["torch", "cpu"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return load_runner(tiny_engine(FAMILY), RuntimeOptions(walker=request.param))


def one_row(ids: Sequence[int], context: int, slot: int, pages: Sequence[int], groups: Sequence[str]) -> StepBatch:
    """A step of one sequence: `ids` after `context` tokens; the last one wants logits."""
    return StepBatch(
        input_ids=np.array(ids, np.int32),
        positions=np.arange(context, context + len(ids), dtype=np.int32),
        cu_seqlens=np.array([0, len(ids)], np.int32),
        context_lens=np.array([context], np.int32),
        state_src=np.array([slot], np.int32),
        state_dst=np.array([slot], np.int32),
        logits_indices=np.array([len(ids) - 1], np.int32),
        block_tables=dict.fromkeys(groups, np.array([pages], np.int32)),
    )


def run(runner: Runner, ids: Sequence[int], context: int, slot: int, pages: Sequence[int]) -> NDArray[np.float32]:
    return runner.step(one_row(ids, context, slot, pages, list(runner.info.num_pages)))


HOME = {"a": (1, [1, 2, 3]), "b": (2, [4, 5, 6])}  # slot and pages of two sequences


def test_poison_reaches_what_it_names_and_nothing_else(runner: Runner) -> None:
    """Freed slots and freed pages both turn the logits of whoever still reads them into NaN."""
    group = next(iter(runner.info.num_pages))
    expected = full_logits(runner, [*IDS, 7])[-1]
    for pages, slots, hit in (({}, [1], "a"), ({group: [2]}, [], "a"), ({}, [2], "b"), ({group: [4, 6]}, [], "b")):
        runner.clear_slots([1, 2])
        for slot, own in HOME.values():
            run(runner, IDS, 0, slot, own)
        runner.poison(pages, slots)
        for name, (slot, own) in HOME.items():
            logits = run(runner, [7], len(IDS), slot, own)[0]
            if name == hit:
                assert np.isnan(logits).all()
            else:
                np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def contents(runner: Runner) -> list[NDArray[np.int32]]:
    """Copies of all pools as integers, so that NaN equals itself bit by bit."""
    return [np.asarray(pool).view(np.int32).copy() for pool in pools(runner)]


def test_a_copy_of_pages_and_slots_goes_on_like_the_original(runner: Runner) -> None:
    """Pages are copied and a row writes a slot beside the one it read: both sequences give the same logits."""
    (group,) = runner.info.num_pages
    runner.clear_slots([1])
    slot, pages = HOME["a"]
    run(runner, IDS, 0, slot, pages)
    before = contents(runner)
    runner.copy_pages({group: [(1, 9), (2, 7), (3, 8)]})
    fork = replace(one_row([7], len(IDS), slot, [9, 7, 8], [group]), state_dst=np.array([5], np.int32))
    forked = runner.step(fork)
    np.testing.assert_array_equal(run(runner, [7], len(IDS), slot, pages), forked)
    np.testing.assert_array_equal(
        run(runner, [8], len(IDS) + 1, slot, pages), run(runner, [8], len(IDS) + 1, 5, [9, 7, 8])
    )
    untouched = [slice(10, None), slice(4, 7)], [slice(2, 5), slice(6, None)]
    for old, new in zip(before, contents(runner), strict=True):
        for part in untouched[len(old) == runner.info.num_slots]:
            assert np.array_equal(old[part], new[part])


def test_what_is_saved_comes_back_anywhere(runner: Runner) -> None:
    """Not in the same pages and slots, bit by bit with NaN in it, more than once, and whatever happened in between."""
    (group,) = runner.info.num_pages
    runner.clear_slots([1])
    slot, pages = HOME["a"]
    run(runner, IDS, 0, slot, pages)
    runner.poison({group: [6]}, [4])
    saved = runner.save({group: [*pages, 6]}, [slot, 4])
    before = contents(runner)
    expected = run(runner, [7], len(IDS), slot, pages)
    runner.poison({group: range(1, 20)}, range(1, runner.info.num_slots))
    runner.restore(saved, {group: [9, 2, 1, 5]}, [3, 1])
    np.testing.assert_array_equal(run(runner, [7], len(IDS), 3, [9, 2, 1]), expected)
    runner.restore(saved, {group: [1, 2, 3, 6]}, [1, 4])
    for old, new in zip(before, contents(runner), strict=True):
        numbers = [1, 4] if len(old) == runner.info.num_slots else [1, 2, 3, 6]
        assert np.array_equal(old[numbers], new[numbers])


def test_nothing_to_copy_save_or_restore(runner: Runner) -> None:
    (group,) = runner.info.num_pages
    before = contents(runner)
    runner.copy_pages({group: []})
    runner.restore(runner.save({group: []}, []), {group: []}, [])
    runner.restore(runner.save({}, []), {}, [])
    assert all(np.array_equal(old, new) for old, new in zip(before, contents(runner), strict=True))


def test_logits_belong_to_the_caller(runner: Runner) -> None:
    """Processors of logits overwrite them; the next step is as if they had not."""
    runner.clear_slots([1, 2])
    first = run(runner, IDS, 0, *HOME["a"])
    expected = first.copy()
    first[:] = np.nan
    np.testing.assert_array_equal(run(runner, IDS, 0, *HOME["b"]), expected)


def test_a_cleared_slot_is_new_and_the_others_go_on(runner: Runner) -> None:
    expected = full_logits(runner, IDS)
    runner.poison({group: range(count) for group, count in runner.info.num_pages.items()}, range(runner.info.num_slots))
    runner.clear_slots([1, 2])
    for slot, pages in HOME.values():
        run(runner, IDS[:-1], 0, slot, pages)
    runner.clear_slots([2])
    slot, pages = HOME["a"]
    np.testing.assert_allclose(run(runner, IDS[-1:], len(IDS) - 1, slot, pages)[0], expected[-1], rtol=0, atol=1e-4)
    slot, pages = HOME["b"]
    np.testing.assert_allclose(run(runner, IDS[:9], 0, slot, pages)[0], expected[8], rtol=0, atol=1e-4)


def test_only_the_tokens_that_want_logits_get_them(runner: Runner) -> None:
    expected = full_logits(runner, IDS)
    runner.clear_slots([1])
    batch = one_row(IDS, 0, *HOME["a"], list(runner.info.num_pages))
    logits = runner.step(replace(batch, logits_indices=np.array([3, 17], np.int32)))
    np.testing.assert_allclose(logits, expected[[3, 17]], rtol=0, atol=1e-4)
    runner.clear_slots([1])
    assert runner.step(replace(batch, logits_indices=np.array([], np.int32))).shape == (0, 96)


def pools(runner: Runner) -> list[Any]:
    assert isinstance(runner, TorchRunner | CpuRunner)
    found: list[Any] = [*runner._states, *(pool for own in runner._pages.values() for pool in own)]
    return [pool.data for pool in found] if isinstance(runner, CpuRunner) else found


def test_pools_are_gone_when_the_runner_is_closed(runner: Runner) -> None:
    full_logits(runner, IDS)
    held = [weakref.ref(pool) for pool in pools(runner)]
    assert held
    runner.close()
    gc.collect()
    assert [pool() for pool in held] == [None] * len(held)


def test_values_are_gone_when_nothing_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the end of a step of 37 tokens few of its values are left: the stream, and the arrays of the step."""
    alive = []

    def gather_rows(step: Step, x: torch.Tensor) -> torch.Tensor:
        tensors = (found for found in gc.get_objects() if type(found) is torch.Tensor)
        alive.append(sum(found.shape[:1] == (37,) for found in tensors))
        return x[step.logits_indices]

    monkeypatch.setattr(pointwise_kernels, "gather_rows", gather_rows)
    runner = load_runner(tiny_engine(FAMILY), RuntimeOptions(walker="torch"))
    full_logits(runner, IDS[:37])
    assert isinstance(runner, TorchRunner)
    assert alive[0] < 12 < len(runner.program.nodes) / 4


def test_float64_holds_states_and_pages_too() -> None:
    """In float64 a sequence in pieces equals a whole one far more closely than float32 pools would allow."""
    runner = float64_runner(tiny_engine(FAMILY))
    whole, pieces = full_logits(runner, IDS), full_logits(runner, IDS, 3)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize("walker", ["onnx", "triton"])
def test_a_walker_that_is_not_known(walker: str) -> None:
    with pytest.raises(ValueError, match=f"walker '{walker}' is not known; known: reference, torch, cpu"):
        load_runner(tiny_engine(FAMILY), RuntimeOptions(walker=walker))


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (400, 25)])
def test_pages_that_hold_so_many_tokens(tokens: int, pages: int) -> None:
    """Whole pages, and the reserved one besides."""
    config = read_engine_config(tiny_engine(FAMILY))
    assert LIMITS.tokens_per_block == 16
    info = runner_info(config, RuntimeOptions(kv_cache_tokens=tokens))
    assert info.num_pages == {"full_attention": 1 + pages}
    default = runner_info(config, RuntimeOptions())
    assert default.num_pages == config.memory().num_pages
    assert replace(info, num_pages=default.num_pages) == default


def test_what_the_scheduler_is_told_are_the_limits_of_the_engine() -> None:
    config = EngineConfig(read_engine_config(tiny_engine(FAMILY)).model, BuildConfig("cpu", 3, 50, 200, 8))
    info = runner_info(config, RuntimeOptions())
    assert (info.max_batch_size, info.max_num_tokens, info.max_seq_len, info.page_size) == (3, 50, 200, 8)
    assert (info.num_slots, info.num_pages) == (1 + 3 + 3, {"full_attention": 1 + 3 * 25})
    assert (info.vocab_size, info.eos_token_ids, info.pad_token_id) == (96, (2,), 0)
    assert list(info.caches) == config.model.caches()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_threads() -> None:
    for count in (2, 1):
        load_runner(tiny_engine(FAMILY), RuntimeOptions(threads=count, walker="torch"))
        assert torch.get_num_threads() == count
    load_runner(tiny_engine(FAMILY))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, value, "not positive") for name in ("threads", "kv_cache_tokens") for value in (0, -1)),
        *((name, -1, "negative") for name in ("prefix_cache_bytes", "max_draft_tokens")),
        ("threads", 1025, "more than 1024"),
    ],
)
def test_options_are_in_their_ranges(name: str, value: int, message: str) -> None:
    options: Mapping[str, int] = {name: value}
    with pytest.raises(ValueError, match=f"{name}={value} is {message}"):
        RuntimeOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["kv_cache_tokens", "prefix_cache_bytes"])
@pytest.mark.parametrize("value", [10**13, 10**20, 10**25])
def test_pools_that_memory_cannot_hold_are_refused(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=r"do not fit into the [\d,]+ bytes of memory that are left: lower kv_cache"):
        load_runner(tiny_engine("jamba"), RuntimeOptions(**{option: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [None, 1, 5, 8, 1000])
@pytest.mark.parametrize("length", [1, 4, 5, 20])
def test_prefill_steps_take_no_more_than_a_step_may(chunk: int | None, length: int) -> None:
    """Pieces of `chunk` tokens, of as many as a step takes where that is less; together they are the sequence."""
    info, size = null_info(max_num_tokens=8, max_seq_len=20), min(chunk or 8, 8)
    batches = list(prefill_steps(info, IDS[:length], chunk))
    assert [batch.num_tokens for batch in batches] == [min(size, length - start) for start in range(0, length, size)]
    assert np.concatenate([batch.input_ids for batch in batches]).tolist() == IDS[:length]
    assert np.concatenate([batch.positions for batch in batches]).tolist() == list(range(length))
    assert [int(batch.context_lens[0]) for batch in batches] == list(range(0, length, size))


def test_full_logits_start_from_a_new_slot_each_time(runner: Runner) -> None:
    first = full_logits(runner, IDS)
    assert first.shape == (len(IDS), 96)
    np.testing.assert_allclose(full_logits(runner, IDS), first, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [0, LIMITS.max_seq_len + 1])
def test_sequences_that_do_not_fit(runner: Runner, length: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} tokens are not in 1\.\.256"):
        full_logits(runner, [1] * length)
