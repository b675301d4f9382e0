"""What `hybridtrt bench` counts: the work of a step, where its time goes, and the machine's limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import tiny_checkpoint
from engines import LIMITS, tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import make_batch, place

from hybridtrt.build.build import build
from hybridtrt.converters.convert import convert
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.plugins.native.library import supported_isas
from hybridtrt.runtime.bench import Bench
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.limits import measure_limits
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.node_profile import OUTSIDE, profile_phase
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.step_log import LoggedStep
from hybridtrt.runtime.work import CountedNode, StepShape, Work, counted_nodes, total

FAMILY = "qwen3_next"  # gated delta, attention, experts
ONE_TOKEN = make_batch([(0, 9, 10)], [[1] * 10], place([10], 16, np.random.default_rng(0)))
ONE = StepShape((9,), (1,), 1)


def runner(walker: str = "cpu", family: str = FAMILY) -> Runner:
    return load_runner(tiny_engine(family), RuntimeOptions(threads=1, walker=walker))


def nodes_of(walker: str = "cpu", family: str = FAMILY) -> list[CountedNode]:
    one = runner(walker, family)
    found = counted_nodes(one)
    one.close()
    return found


sequences = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(sequences, st.none() | st.integers(1, 8), st.none() | st.integers(1, 15))
def test_keys_attended_and_visible(rows: list[tuple[int, int]], window: int | None, limit: int | None) -> None:
    """Against the sets of keys that every token sees."""
    shape = StepShape(tuple(context for context, _ in rows), tuple(count for _, count in rows), len(rows))
    attended = visible = 0
    for context, count in rows:
        seen: set[int] = set()
        for position in range(context, context + count):
            keys = set(range(0 if window is None else max(position - window + 1, 0), position + 1))
            attended += len(keys)
            seen |= keys
        visible += len(seen if limit is None else seen & set(range(limit)))
    assert shape.tokens == sum(count for _, count in rows)
    assert shape.attended(window) == attended
    assert shape.visible(window, limit) == visible


@pytest.mark.parametrize("family", [FAMILY, "jamba", "granitemoehybrid"])
def test_both_runners_compute_the_same(family: str) -> None:
    """However nodes are merged, the operations stay; packed bytes are those of float32 and of filled up panels."""
    cpu, torch = nodes_of("cpu", family), nodes_of("torch", family)
    assert len(cpu) < len(torch)
    for shape in (ONE, StepShape((0, 3), (7, 1), 2)):
        packed, plain = (total(node.work(shape) for node in nodes) for nodes in (cpu, torch))
        assert packed.flops == plain.flops
        assert 0.95 * plain.bytes < packed.bytes < 2 * plain.bytes
    assert {node.kind for node in cpu} == {node.kind for node in torch}


def test_kinds() -> None:
    assert {node.kind for node in nodes_of()} == {"embedding", "gated_delta", "attention", "moe", "head"}


def test_experts_are_read_as_even_choices_would() -> None:
    (experts, *_) = (node for node in nodes_of() if node.spec.name == "experts")
    number, chosen = int(experts.weights["up"].shape[0]), int(experts.inputs[1].shape[1])
    whole = sum(experts.weight_bytes.values())
    assert experts.work(ONE).bytes == pytest.approx(whole * chosen / number)
    many = experts.work(StepShape((0,), (3,), 1)).bytes
    assert many == pytest.approx(whole * (1 - (1 - chosen / number) ** 3))
    assert experts.work(StepShape((0,), (1000,), 1)).bytes == pytest.approx(whole)


def test_attention_moves_its_pages_and_a_scan_its_state() -> None:
    found = {node.spec.name: node for node in nodes_of()}
    attention, scan = found["attention"], found["linear_attention"]
    (pages,), (state,) = attention.caches, scan.caches
    assert isinstance(pages, PageSpec)
    assert not isinstance(state, PageSpec)
    shape = StepShape((9, 4), (1, 1), 2)
    assert attention.work(shape).bytes == (10 + 5 + 2) * pages.bytes_per_token  # read, and two tokens written
    weights = sum(scan.weight_bytes.values())
    assert scan.work(shape).bytes - weights == 2 * 2 * state.bytes_per_slot
    windowed = replace(attention, caches=(replace(pages, window=3),))
    assert windowed.work(shape).bytes == (3 + 3 + 2) * pages.bytes_per_token
    assert windowed.work(shape).flops * 15 == attention.work(shape).flops * 6


def test_a_profile_adds_up() -> None:
    """Half of a phase is spent in its nodes, each of which takes a millisecond a step."""
    nodes = nodes_of()
    steps = [LoggedStep(ONE_TOKEN, np.full(len(nodes), 1e-3))] * 3
    profile = profile_phase("decode", nodes, steps, 3 * len(nodes) * 2e-3)
    assert (profile.phase, profile.steps) == ("decode", 3)
    assert profile.milliseconds == pytest.approx(2 * len(nodes))
    for lines in (profile.kinds, profile.ops):
        inside = [line for line in lines if line.name != OUTSIDE]
        assert sum(line.milliseconds for line in inside) == pytest.approx(len(nodes))
        assert sum(line.share for line in inside) == pytest.approx(0.5, abs=0.01)
        moved = sum(line.gb_per_s * line.milliseconds * 1e6 for line in inside)
        assert moved == pytest.approx(total(node.work(ONE) for node in nodes).bytes, rel=0.05)
        assert [line.milliseconds for line in lines] == sorted((line.milliseconds for line in lines), reverse=True)
    (outside,) = (line for line in profile.kinds if line.name == OUTSIDE)
    assert (outside.milliseconds, outside.share) == (pytest.approx(len(nodes)), 0.5)
    assert "by layer kind" in profile.render()
    assert "gated_delta" in profile.render()
    with pytest.raises(ValueError, match="nodes were not timed"):
        profile_phase("decode", nodes, [LoggedStep(ONE_TOKEN)], 1.0)


def test_a_run_is_parted_at_the_last_first_token() -> None:
    with Bench(runner(), profile=True) as bench:
        assert bench.profiles
        run = bench.run([[5] * 200, [6] * 200, [7] * 200], 4)  # steps of 256 tokens
        assert sum(step.shape.tokens for step in run.prefill_steps) >= 600
        assert all(set(step.shape.counts) == {1} for step in run.decode_steps)
        assert len(run.decode_steps) == len(run.decode_step_seconds)
        pairs = zip(run.between_seconds, run.decode_step_seconds, strict=True)
        assert all(0 < between < whole for between, whole in pairs)
        made = sum(map(len, run.tokens.values()))
        first = made - run.decode_tokens
        assert (made, len(run.first_token_seconds)) == (12, 3)
        assert first >= 3
        assert run.prefill_seconds == max(run.first_token_seconds)
        prefill, decode = bench.profile(run)
        assert (prefill.phase, decode.phase) == ("prefill", "decode")
        for step in (*run.prefill_steps, *run.decode_steps):
            assert step.node_seconds is not None
            assert len(step.node_seconds) == len(bench.nodes)
            assert (step.node_seconds >= 0).all()
            assert step.node_seconds.sum() > 0
        again = bench.run([[5] * 200, [6] * 200, [7] * 200], 4)
        assert again.tokens == run.tokens


def test_what_was_achieved_has_its_share_of_the_limits() -> None:
    with Bench(runner("torch"), profile=True) as bench:
        assert not bench.profiles
        run = bench.run([[1, 2, 3]], 3)
        assert bench.profile(run) == ()
        limits = measure_limits(1)
        free, shared = bench.achieved(run.decode_steps, 0.5), bench.achieved(run.decode_steps, 0.5, limits)
        work = total(node.work(step.shape) for step in run.decode_steps for node in bench.nodes)
    assert (free.memory_share, free.compute_share) == (None, None)
    assert shared.gb_per_s == free.gb_per_s == pytest.approx(work.bytes / 0.5e9, abs=0.006)
    assert shared.memory_share == pytest.approx(work.bytes / 0.5e9 / limits.read_gb_per_s, abs=0.001)
    assert "of the limit" not in free.render()
    assert "of the limit" in shared.render()


def test_limits() -> None:
    for isa in supported_isas():
        limits = measure_limits(2, isa)
        assert (limits.threads, limits.isa) == (2, isa)
        assert 0 <= limits.median_read_gb_per_s <= limits.read_gb_per_s
        assert 0.1 < limits.read_gb_per_s < 10_000
        assert 0 <= limits.median_gflop_per_s <= limits.gflop_per_s
        assert 0.5 < limits.gflop_per_s < 100_000
    with pytest.raises(ValueError, match="instruction set 'mmx' is not known; known: base, avx2, avx512"):
        measure_limits(1, "mmx")


def test_work_adds() -> None:
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)
    assert total([]) == Work()
    assert isinstance(runner(), CpuRunner)


def test_an_engine_too_short_to_measure(tmp_path: Path) -> None:
    convert(tiny_checkpoint(FAMILY), tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engine", replace(LIMITS, max_seq_len=2))
    with Bench(load_runner(tmp_path / "engine")) as bench, pytest.raises(ValueError, match="at most 2 tokens together"):
        bench.check([1], 1, 2)
