"""The C++ runner against the torch one on the same stored weights, and what it does without a library."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from checkpoints import tiny_checkpoint
from engines import LIMITS, tiny_engine, typical_error
from numpy.typing import NDArray
from steps import make_batch, place

from hybridtrt.build.build import build
from hybridtrt.build.engine import BuildConfig
from hybridtrt.converters.convert import convert
from hybridtrt.plugins.native.library import load_library, supported_isas
from hybridtrt.runtime import load
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import RuntimeOptions, default_threads, load_runner
from hybridtrt.runtime.torch_runner import TorchRunner

FAMILIES = ("qwen3_next", "granitemoehybrid", "jamba", "minimax", "nemotron_h", "deepseek_v3")
IDS = np.random.default_rng(1).integers(0, 96, 50).tolist()
# Of the logits' standard deviation, against float32 compute with the same stored weights: integers are multiplied with
# activations rounded to 16 bits, and bfloat16 on request with those rounded to bfloat16, which has 8.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-4, "bfloat16_rounded": 3e-2, "int8": 2e-3, "int4": 2e-3}


def stored_as(weights: str) -> BuildConfig:
    """`LIMITS` with a format of `TOLERANCE`."""
    activations = "bfloat16" if weights.endswith("_rounded") else None
    return replace(LIMITS, weights=weights.removesuffix("_rounded"), activations=activations)


@cache
def checkpoint(family: str, dtype: str, folder: Path) -> Path:
    convert(tiny_checkpoint(family), folder / f"{family}-{dtype}", dtype)
    return folder / f"{family}-{dtype}"


def logits(engine: Path, **options: object) -> NDArray[np.float32]:
    runner = load_runner(engine, RuntimeOptions(**options))  # type: ignore[arg-type]
    found = full_logits(runner, IDS)
    runner.close()
    return found


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_format_of_weights(
    family: str, weights: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = checkpoint(family, "bfloat16", tmp_path_factory.getbasetemp())
    build(source, tmp_path / "engine", stored_as(weights))
    expected = logits(tmp_path / "engine", walker="torch")
    assert typical_error(logits(tmp_path / "engine"), expected) < TOLERANCE[weights]
    build(source, tmp_path / "float", replace(LIMITS, weights="float32"))
    rounding = typical_error(expected, logits(tmp_path / "float", walker="torch"))
    assert (rounding == 0) == (weights in ("float32", "bfloat16", "bfloat16_rounded"))


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_activations(family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """They change what is computed, alike with every instruction set, and nothing of what is stored."""
    source = checkpoint(family, "bfloat16", tmp_path_factory.getbasetemp())
    plain = build(source, tmp_path / "plain", LIMITS)
    rounded = build(source, tmp_path / "rounded", replace(LIMITS, activations="bfloat16"))
    assert rounded.weight_bytes() == plain.weight_bytes()
    exact = logits(tmp_path / "plain")
    for isa in supported_isas():
        assert 1e-4 < typical_error(logits(tmp_path / "rounded", isa=isa), exact) < TOLERANCE["bfloat16_rounded"]
    with pytest.raises(ValueError, match=r"activations='bfloat16': no matrix of .* is bfloat16"):
        build(source, tmp_path / "excluded", replace(LIMITS, activations="bfloat16", exclude=("*",)))
    assert not (tmp_path / "excluded").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_instruction_sets_and_threads(family: str) -> None:
    """Any number of threads gives the same bits; instruction sets differ in the last ones."""
    engine = tiny_engine(family)
    expected = logits(engine, threads=1)
    for threads in (2, 3):
        np.testing.assert_array_equal(logits(engine, threads=threads), expected)
    for isa in supported_isas():
        assert typical_error(logits(engine, isa=isa), expected) < 1e-4


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_token_is_bitwise_the_same_in_any_batch(
    family: str, weights: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Beside other decode tokens and prefill chunks, in any order, and alone."""
    source = checkpoint(family, "bfloat16", tmp_path_factory.getbasetemp())
    build(source, tmp_path / "engine", stored_as(weights))
    rng = np.random.default_rng(1)
    lengths = [33, 1, 7, 20, 40]
    tokens = [rng.integers(0, 96, length + 1).tolist() for length in lengths]
    results = []
    for together in (True, False):
        runner = load_runner(tmp_path / "engine")
        placement = place([length + 1 for length in lengths], LIMITS.tokens_per_block, np.random.default_rng(2))
        runner.clear_slots(placement.slots)
        groups = list(runner.info.num_pages)
        for sequence, length in enumerate(lengths):  # each prompt alone, so that its caches are the same
            runner.step(make_batch([(sequence, 0, length)], tokens, placement, groups))
        rows = [(sequence, length, length + 1) for sequence, length in enumerate(lengths)]
        if together:
            order = rng.permutation(len(rows)).tolist()
            found = runner.step(make_batch([rows[i] for i in order], tokens, placement, groups))
            results.append(found[np.argsort(order)])
        else:
            results.append(np.concatenate([runner.step(make_batch([row], tokens, placement, groups)) for row in rows]))
        runner.close()
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_that_was_not_written(family: str) -> None:
    """With an arena and scratch memory full of NaN before every step: the same bits."""
    engine = tiny_engine(family)
    plain = load_runner(engine)
    assert isinstance(plain, CpuRunner)
    poisoned = CpuRunner(plain.program, plain._lower, plain._weights, plain.info, threads=2, poison=True)
    for chunk in (1, 7, None):
        np.testing.assert_array_equal(full_logits(poisoned, IDS, chunk), full_logits(plain, IDS, chunk))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_trace(family: str) -> None:
    """Node by node as torch computes it; what is cut or flattened is the same memory."""
    ours, theirs = (load_runner(tiny_engine(family), RuntimeOptions(walker=walker)) for walker in ("cpu", "torch"))
    assert isinstance(ours, CpuRunner)
    assert isinstance(theirs, TorchRunner)
    names = [name for node in ours.program.nodes for name in node.outputs]
    placement = place([20], LIMITS.tokens_per_block, np.random.default_rng(0))
    batch = make_batch([(0, 0, 20)], [IDS], placement, list(ours.info.num_pages))
    for runner in (ours, theirs):
        runner.clear_slots(placement.slots)
    found, expected = ours.trace(batch, names), theirs.trace(batch, names)
    for name in names:
        scale = max(float(np.abs(expected[name]).max()), 1e-6)
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-4 * scale, err_msg=name)


def test_without_the_library_torch_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYBRIDTRT_LIBRARY", "/nowhere/_cpu.so")
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            runner = load_runner(tiny_engine("qwen3_next"))
    finally:
        load_library.cache_clear()
    assert isinstance(runner, TorchRunner)
    (record,) = caplog.records
    assert record.getMessage() == (
        "/nowhere/_cpu.so is missing: HYBRIDTRT_LIBRARY names it: running on torch, which is slower"
    )


def test_an_instruction_set_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option or the environment: it is said when an engine is loaded, not when something is sampled."""
    monkeypatch.setenv("HYBRIDTRT_ISA", "mmx")
    with pytest.raises(ValueError, match="instruction set 'mmx' is not known"):
        load_runner(tiny_engine("qwen3_next"))
    monkeypatch.setenv("HYBRIDTRT_ISA", "base")
    runner = load_runner(tiny_engine("qwen3_next"))
    assert isinstance(runner, CpuRunner)
    assert runner.isa == "base"
    runner.close()
    with pytest.raises(ValueError, match="instruction set 'avx10' is not known; known: base, avx2, avx512"):
        load_runner(tiny_engine("qwen3_next"), RuntimeOptions(isa="avx10"))


def test_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads() == 3
    for other in ("", "0", "many", "4,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", other)
        assert default_threads() >= 1


def test_more_threads_than_cores_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "available_cores", lambda: 2)
    for threads, warnings in ((2, []), (3, ["3 threads on 2 cores wait for each other: fewer are faster"])):
        load_runner(tiny_engine("qwen3_next"), RuntimeOptions(threads=threads)).close()
        assert [record.getMessage() for record in caplog.records] == warnings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int2"}, "weights='int2' with target=cpu: expected one of float32, bfloat16, int8, int4"),
        ({"weights": "int4", "group_size": 0}, "group_size=0 with weights=int4: expected one of 32, 64, 128"),
        ({"weights": "int8", "group_size": 7}, "group_size=7 with weights=int8: expected one of 0, 32, 64, 128"),
        ({"weights": "bfloat16", "group_size": 32}, "group_size=32 with weights=bfloat16: expected int8 or int4"),
        ({"group_size": 32}, "group_size=32 with weights=None: expected int8 or int4 weights"),
        ({"activations": "float16"}, "activations='float16' with target=cpu: expected one of float32, bfloat16"),
        (
            {"activations": "bfloat16", "weights": "int8"},
            "activations='bfloat16' with weights='int8': expected bfloat16 weights",
        ),
    ],
)
def test_formats_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildConfig(**options)  # type: ignore[arg-type]
