"""The TensorRT runner on a device of host memory: what it binds, pads, captures and moves, against the torch runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import tiny_engine
from host_device import HostDevice, HostEngine
from steps import cut, make_batch, place

from hybridtrt.build.engine import read_engine_config
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.gpu import pinned_chunks
from hybridtrt.runtime.gpu.decode_buckets import DecodeBuckets
from hybridtrt.runtime.gpu.runner import TensorRTRunner
from hybridtrt.runtime.load import RuntimeOptions, open_packed, runner_info
from hybridtrt.runtime.load_torch import unpacked
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.torch_runner import TorchRunner

FAMILIES = ("qwen3_next", "nemotron_h", "jamba", "gpt_oss", "deepseek_v3", "lfm2")


def runners(family: str, **options: Any) -> tuple[TensorRTRunner, TorchRunner, HostDevice, HostEngine, RunnerInfo]:
    """The runner of a tiny engine on host memory, and the one on torch."""
    folder = tiny_engine(family)
    config = read_engine_config(folder)
    info = runner_info(config, RuntimeOptions())
    program, weights = unpacked(config, open_packed(folder, config))
    device = HostDevice()
    engine = HostEngine(device, program, weights)
    return (
        TensorRTRunner(info, device, engine, engine.outputs, **options),
        TorchRunner(program, weights, info),
        device,
        engine,
        info,
    )


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_of_any_batch(family: str, graphs: bool) -> None:
    """Prefill in pieces and decoding, mixed: the same logits, while all that is free holds NaN."""
    runner, expected, device, engine, info = runners(family, graphs=graphs)
    rng = np.random.default_rng(3)
    lengths = [1, 2, 9, 17]
    tokens = [rng.integers(0, info.vocab_size, n + 12).tolist() for n in lengths]
    placement = place([n + 12 for n in lengths], info.page_size, rng)
    pages = {group: sorted({*range(1, count)}) for group, count in info.num_pages.items()}
    slots = [slot for slot in range(1, info.num_slots) if slot not in placement.slots]
    runner.poison(pages, slots)
    runner.clear_slots(placement.slots)
    steps = list(cut(lengths, 7, rng))
    for t in range(12):
        rows = rng.permutation(len(lengths))[: rng.integers(1, len(lengths) + 1)] if t % 3 == 0 else range(len(lengths))
        steps.append([(int(s), done[0], done[0] + 1) for s in rows if (done := [lengths[s]])])
        lengths = [n + (s in rows) for s, n in enumerate(lengths)]
    for rows in steps:
        batch = make_batch(rows, tokens, placement, list(info.num_pages))
        np.testing.assert_allclose(runner.step(batch), expected.step(batch), rtol=0, atol=1e-4)
    assert ("replay" in device.log) == graphs
    assert {profile for profile, _ in engine.runs} == {0, 1}


def decode_batch(rows: int, info: RunnerInfo) -> StepBatch:
    placement = place([5] * rows, info.page_size, np.random.default_rng(rows))
    return make_batch([(s, 4, 5) for s in range(rows)], [[1] * 5] * rows, placement, list(info.num_pages))


def test_decode_steps_run_in_buckets_from_a_graph() -> None:
    """Once as it is and captured in the same shapes, from then on replayed; each power of two has its own graph."""
    runner, _, device, engine, info = runners("qwen3_next")
    for rows, expected in (
        (3, ["execute", "capture"]), (5, ["execute", "capture"]), (4, ["replay"]), (3, ["replay"]), (8, ["replay"]),
        (1, ["execute", "capture"]), (1, ["replay"]), (2, ["execute", "capture"]),
    ):  # fmt: skip
        device.log.clear()
        runner.step(decode_batch(rows, info))
        assert device.log == ["upload", *expected, "download", "synchronize"]
    assert [shapes["input_ids"] for _, shapes in engine.runs] == [(4,), (4,), (8,), (8,), (1,), (1,), (2,), (2,)]
    assert all(shapes["cu_seqlens"][0] == shapes["state_src"][0] + 1 for _, shapes in engine.runs)


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    runner, _, device, engine, info = runners("qwen3_next")
    engine.can_be_captured = False
    for _ in range(3):
        device.log.clear()
        runner.step(decode_batch(3, info))
        assert device.log == ["upload", "execute", "download", "synchronize"]


def test_padding_rows_touch_slot_0_and_page_0_alone() -> None:
    runner, _, device, _, info = runners("qwen3_next")
    batch = decode_batch(3, info)
    before = {spec.name: device.at(pool.address, pool.size).copy() for pool in runner._pools for spec in [pool.spec]}
    runner.step(batch)
    tables = {group: set(table[:, 0].tolist()) for group, table in batch.block_tables.items()}
    for pool in runner._pools:
        now = device.at(pool.address, pool.size).reshape(pool.count, -1)
        changed = set(np.nonzero((now != before[pool.spec.name].reshape(now.shape)).any(1))[0].tolist())
        own = tables[pool.spec.group] if isinstance(pool.spec, PageSpec) else set(batch.state_dst.tolist())
        assert changed <= own | {0}
        assert own <= changed


@pytest.mark.parametrize("rows", [1, 3, 4, 6, 7, 100])
def test_buckets(rows: int) -> None:
    buckets = DecodeBuckets(100, {"g": 6})
    zeros = np.zeros(rows, np.int32)
    numbers = np.arange(rows + 1, dtype=np.int32)
    table = np.ones((rows, 3), np.int32)
    batch = StepBatch(zeros + 5, zeros + 2, numbers, zeros + 2, zeros + 1, zeros + 1, numbers[:-1], {"g": table})
    bucket = buckets.of(batch)
    assert bucket is not None
    assert bucket.pages == (("g", 4),)
    assert bucket.rows == min(100, {1: 1, 3: 4, 4: 4, 6: 8, 7: 8, 100: 128}[rows])
    padded = buckets.pad(batch, bucket)
    for name in ("input_ids", "positions", "context_lens", "state_src", "state_dst"):
        assert getattr(padded, name).tolist() == getattr(batch, name).tolist() + [0] * (bucket.rows - rows)
    assert padded.block_tables["g"].shape == (bucket.rows, 4)
    assert padded.block_tables["g"][:rows, :3].all()
    assert padded.block_tables["g"].sum() == table.sum()
    assert padded.cu_seqlens.tolist() == list(range(bucket.rows + 1))
    assert buckets.of(replace(batch, logits_indices=numbers[:0])) is None
    assert buckets.of(replace(batch, input_ids=np.zeros(rows + 1, np.int32))) is None


def test_a_step_without_logits() -> None:
    runner, _, _, engine, info = runners("qwen3_next")
    placement = place([9], info.page_size, np.random.default_rng(0))
    batch = make_batch([(0, 0, 9)], [[3] * 9], placement, list(info.num_pages))
    assert runner.step(replace(batch, logits_indices=batch.logits_indices[:0])).shape == (0, info.vocab_size)
    assert engine.runs[-1][1]["logits_indices"] == (1,)


def test_pages_and_slots_are_saved_moved_and_restored() -> None:
    """Bit for bit, to other places than they came from, and nothing else changes."""
    runner, _, device, _, info = runners("qwen3_next")
    rng = np.random.default_rng(5)
    for pool in runner._pools:
        device.at(pool.address, pool.size)[:] = rng.integers(0, 255, pool.size, np.uint8)

    def bytes_of(pages: int, slot: int) -> list[bytes]:
        numbers = [(pool, pages if isinstance(pool.spec, PageSpec) else slot) for pool in runner._pools]
        return [device.at(pool.at(number), pool.stride).tobytes() for pool, number in numbers]

    (group,) = info.num_pages
    want = bytes_of(3, 2)
    saved = runner.save({group: [3]}, [2])
    runner.poison({group: [3]}, [2])
    assert all(set(data) == {0xFF} for data in bytes_of(3, 2))
    before = bytes_of(4, 4)
    runner.restore(saved, {group: [5]}, [3])
    assert bytes_of(5, 3) == want
    assert bytes_of(4, 4) == before
    runner.copy_pages({group: [(5, 6)]})
    runner.clear_slots([3])
    pages = [isinstance(pool.spec, PageSpec) for pool in runner._pools]
    for is_page, data, copied in zip(pages, want, bytes_of(6, 3), strict=True):
        assert copied == (data if is_page else bytes(len(data)))
    with pytest.raises(ValueError, match=r"is not in 0\.\."):
        runner.clear_slots([info.num_slots])


def test_what_is_saved_lies_in_chunks_that_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often, as many chunks are locked as hold what is saved at once; pages and slots may straddle them."""
    monkeypatch.setattr(pinned_chunks, "CHUNK", 1000)
    runner, _, device, _, info = runners("qwen3_next")
    rng = np.random.default_rng(6)
    for pool in runner._pools:
        device.at(pool.address, pool.size)[:] = rng.integers(0, 255, pool.size, np.uint8)

    def bytes_of(number: int) -> list[bytes]:
        return [device.at(pool.at(number), pool.stride).tobytes() for pool in runner._pools]

    (group,) = info.num_pages
    want, before = [bytes_of(1), bytes_of(2)], len(device._pinned)
    size = sum(len(data) for data in want[0])
    assert all(pool.stride % 1000 for pool in runner._pools)
    for _ in range(3):
        saved = [runner.save({group: [number]}, [number]) for number in (1, 2)]
        runner.poison({group: [1, 2]}, [1, 2])
        for copy, number in zip(saved, (2, 1), strict=True):  # each where the other was
            runner.restore(copy, {group: [number]}, [number])
        want.reverse()
        assert [bytes_of(1), bytes_of(2)] == want
        del saved, copy
    assert len(device._pinned) - before == 2 * -(-size // 1000)


def test_logits_have_a_place_for_some_tokens_of_a_step() -> None:
    runner, expected, device, engine, info = runners("qwen3_next")
    few = replace(info, max_logits_rows=4)
    before = device.free_bytes()
    runner = TensorRTRunner(few, device, engine, engine.outputs)
    placement = place([6], info.page_size, np.random.default_rng(0))
    batch = make_batch([(0, 0, 6)], [[3] * 6], placement, list(info.num_pages))
    last = replace(batch, logits_indices=np.array([1, 2, 4, 5], np.int32))
    np.testing.assert_allclose(runner.step(last), expected.step(last), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"^5 tokens want logits; the engine takes 4 in a step$"):
        runner.step(replace(batch, logits_indices=np.arange(5, dtype=np.int32)))
    used = before - device.free_bytes()
    TensorRTRunner(replace(few, max_logits_rows=3), device, engine, engine.outputs)
    assert before - device.free_bytes() == 2 * used - 4 * info.vocab_size


def test_an_engine_with_other_inputs_is_refused() -> None:
    folder = tiny_engine("qwen3_next")
    config = read_engine_config(folder)
    program, weights = unpacked(config, open_packed(folder, config))
    device = HostDevice()
    engine = HostEngine(device, program, weights)
    engine.names |= {"layers.9.strange"}
    with pytest.raises(ValueError, match=r"nothing is bound to: layers\.9\.strange$"):
        TensorRTRunner(runner_info(config, RuntimeOptions()), device, engine, engine.outputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_clear_line() -> None:
    from hybridtrt.runtime.gpu.cuda_device import CudaDevice

    with pytest.raises(
        ValueError, match=r"needs an NVIDIA GPU, and CUDA finds none here \(\w+\); build with --target cpu"
    ):
        CudaDevice()
