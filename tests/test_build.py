"""Engine folders: what `build` writes and leaves alone, and what foreign, old and damaged folders say."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import tiny_checkpoint, tiny_text_checkpoint

import hybridtrt
from hybridtrt.build.build import build, default_build_config
from hybridtrt.build.engine import BuildConfig, is_engine, read_engine_config
from hybridtrt.build.inspect import inspect
from hybridtrt.cli import main
from hybridtrt.converters.checkpoint import load_checkpoint
from hybridtrt.converters.convert import convert
from hybridtrt.converters.describe import describe
from hybridtrt.plugins.caches import DTYPE_BYTES, PageSpec, StateSpec
from hybridtrt.runtime.load import load_runner, open_packed
from hybridtrt.runtime.load_torch import unpacked
from hybridtrt.runtime.tokenizer import load_tokenizer

LIMITS = BuildConfig(max_batch_size=3, max_num_tokens=50, max_seq_len=200, tokens_per_block=16)
MOST = {"max_batch_size": 4096, "max_num_tokens": 1 << 20, "max_seq_len": 1 << 24, "tokens_per_block": 4096}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    convert(tiny_text_checkpoint("jamba"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Path:
    build(checkpoint, tmp_path / "engine", LIMITS)
    return tmp_path / "engine"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_engine_is_its_checkpoint_with_limits(checkpoint: Path, tmp_path: Path) -> None:
    config = build(checkpoint, tmp_path / "engine", LIMITS)
    assert config == read_engine_config(tmp_path / "engine")
    assert config.build == LIMITS
    written = files_of(tmp_path / "engine")
    program, weights = unpacked(config, open_packed(tmp_path / "engine", config))
    stored = load_checkpoint(checkpoint)
    assert weights.keys() == program.weights.keys()
    assert {name.split("@")[0] for name in weights} == stored.config.weight_table().keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored.tensor(name.split("@")[0]))
    assert written.keys() == {"config.json", "rank0.engine", "tokenizer/tokenizer.json", "tokenizer/settings.json"}
    tokenizer = load_tokenizer(tmp_path / "engine")
    assert tokenizer is not None
    oracle = transformers.AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    assert list(tokenizer.encode("def main(): 日本<|eos|>")) == oracle.encode("def main(): 日本<|eos|>")
    data = json.loads(written["config.json"])
    assert data.keys() == {"version", "pretrained_config", "build_config"}
    assert (data["version"], data["build_config"]) == (hybridtrt.__version__, json.loads(json.dumps(asdict(LIMITS))))
    assert is_engine(tmp_path / "engine")
    assert not is_engine(checkpoint)

    shutil.rmtree(checkpoint / "tokenizer")
    build(checkpoint, tmp_path / "engine", LIMITS)
    assert files_of(tmp_path / "engine").keys() == {"config.json", "rank0.engine"}


def test_a_tokenizer_that_cannot_be_read_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        build(checkpoint, tmp_path / "engine", LIMITS)
    assert not (tmp_path / "engine").exists()


def test_progress_counts_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = build(checkpoint, tmp_path / "engine", LIMITS, lambda done, total: seen.append((done, total)))
    done = [done for done, _ in seen]
    assert {total for _, total in seen} == {config.memory().weight_bytes}
    assert done == sorted(done)
    assert done[-1] == config.memory().weight_bytes


def test_an_older_engine_is_replaced_only_by_a_whole_one(checkpoint: Path, engine: Path) -> None:
    before = files_of(engine)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, engine, replace(LIMITS, max_seq_len=100), fail)
    assert files_of(engine) == before
    assert {path.name for path in engine.parent.iterdir()} == {"checkpoint", "engine"}
    build(checkpoint, engine, replace(LIMITS, max_seq_len=100))
    assert read_engine_config(engine).build.max_seq_len == 100
    assert {path.name for path in engine.parent.iterdir()} == {"checkpoint", "engine"}


def test_an_older_engine_comes_back_if_the_new_one_cannot_take_its_place(
    checkpoint: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = files_of(engine), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise OSError("disk full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        build(checkpoint, engine, replace(LIMITS, max_seq_len=100))
    assert files_of(engine) == before
    assert {path.name for path in engine.parent.iterdir()} == {"checkpoint", "engine"}


def test_anything_else_in_the_way_is_left_alone(checkpoint: Path) -> None:
    foreign = checkpoint.parent / "foreign"
    shutil.copytree(tiny_checkpoint("jamba"), foreign)
    before = files_of(checkpoint.parent)
    for target, message in (
        (foreign, "exists and was not written by hybridtrt"),
        (foreign / "config.json", "exists and was not written by hybridtrt"),
        (checkpoint, "holds the checkpoint itself"),
        (checkpoint.parent, "holds the checkpoint itself"),
    ):
        with pytest.raises(ValueError, match=message):
            build(checkpoint, target, LIMITS)
    assert files_of(checkpoint.parent) == before


@pytest.mark.parametrize("name", MOST)
def test_limits_are_bounded(name: str) -> None:
    roomy: dict[str, Any] = {"max_batch_size": 1, "max_num_tokens": 4096}
    for value in (1, MOST[name]):
        assert asdict(BuildConfig(**roomy | {name: value}))[name] == value
    for value in (0, -1, MOST[name] + 1):
        with pytest.raises(ValueError, match=rf"{name}={value} is not in 1\.\.{MOST[name]}"):
            BuildConfig(**roomy | {name: value})


def test_a_step_holds_one_token_of_every_sequence() -> None:
    assert BuildConfig(max_batch_size=9, max_num_tokens=9).max_num_tokens == 9
    with pytest.raises(ValueError, match="max_num_tokens=8 is less than max_batch_size=9"):
        BuildConfig(max_batch_size=9, max_num_tokens=8)
    with pytest.raises(ValueError, match="target 'gpu' is not known; known: cpu"):
        BuildConfig(target="gpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_capacity_factor": 0.0}, "moe_capacity_factor=0.0 is not a positive number"),
        ({"moe_capacity_factor": -1.0}, "moe_capacity_factor=-1.0 is not a positive number"),
        ({"moe_capacity_factor": math.inf}, "moe_capacity_factor=inf is not a positive number"),
        ({"moe_capacity_factor": math.nan}, "moe_capacity_factor=nan is not a positive number"),
        ({"moe_capacity_factor": 1.0, "moe_overflow": "wait"}, "moe_overflow='wait' is not one of drop, next_best"),
        ({"moe_overflow": "drop"}, "moe_overflow='drop' without moe_capacity_factor: no expert overflows"),
    ],
)
def test_capacities_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        BuildConfig(**options)


def test_capacity_without_experts_is_refused(tmp_path: Path) -> None:
    convert(tiny_checkpoint("gemma3_text"), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"moe_capacity_factor=1\.5: there are no experts in .*checkpoint"):
        build(tmp_path / "checkpoint", tmp_path / "engine", BuildConfig(moe_capacity_factor=1.5))
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8", "half", ""])
def test_caches_of_fewer_bits_are_refused(dtype: str) -> None:
    known = "is not one of float32, bfloat16, float16"
    with pytest.raises(ValueError, match=f"state_dtype='{dtype}' {known}: a state adds up every token"):
        BuildConfig(state_dtype=dtype)
    with pytest.raises(ValueError, match=f"kv_cache_dtype='{dtype}' {known}"):
        BuildConfig(kv_cache_dtype=dtype)


@pytest.mark.parametrize(("state", "kv"), [("float32", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")])
def test_dtypes_of_caches_by_option(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, kv: str
) -> None:
    """They reach the plan, the layer table and the pools; of half precision only bfloat16 comes without a warning."""
    arguments = [str(checkpoint), "-o", str(tmp_path / "engine"), "--state-dtype", state, "--kv-cache-dtype", kv]
    assert main(["build", *arguments]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == (state == "float16")
    assert all("float16 overflow beyond 65504" in line for line in warnings)
    runner, config = load_runner(tmp_path / "engine"), read_engine_config(tmp_path / "engine")
    assert (config.build.state_dtype, config.build.kv_cache_dtype) == (state, kv)
    assert {type(spec): spec.dtype for spec in runner.info.caches} == {StateSpec: state, PageSpec: kv}
    full, report = describe(config.model), inspect(tmp_path / "engine")
    assert report.summary.state_bytes * 4 == full.state_bytes * DTYPE_BYTES[state]
    assert report.memory is not None
    assert report.memory.state_bytes == report.memory.num_slots * report.summary.state_bytes
    assert main(["inspect", str(tmp_path / "engine")]) == 0
    assert f"state_dtype {state}, kv_cache_dtype {kv}" in capsys.readouterr().out


def test_an_engine_from_before_there_were_dtypes_of_caches(engine: Path) -> None:
    path = engine / "config.json"
    data = json.loads(path.read_text())
    for name in ("state_dtype", "kv_cache_dtype"):
        del data["build_config"][name]
    path.write_text(json.dumps(data))
    assert read_engine_config(engine).build == LIMITS


def test_pages_by_group_with_their_rings(tmp_path: Path) -> None:
    """A window of 8 and steps of 20 tokens in pages of 16: at most the pages of 27 tokens, which begin anywhere."""
    convert(tiny_checkpoint("gemma3_text"), tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engine", replace(LIMITS, max_num_tokens=20))
    text = inspect(tmp_path / "engine").render()
    config = read_engine_config(tmp_path / "engine")
    size = {name: pool.num_bytes for name, pool in config.memory().groups.items()}
    window = f"window_8 10, at most 3 a sequence for a window of 8 tokens: {size['window_8']:,} bytes"
    assert window in text
    assert f"full_attention 40, at most 13 a sequence: {size['full_attention']:,} bytes" in text


def test_sequences_are_no_longer_than_the_models_positions(tmp_path: Path) -> None:
    model = shutil.copytree(tiny_checkpoint("jamba"), tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    for positions, default in ((70, 70), (10_000, 2048)):
        (model / "config.json").write_text(json.dumps(values | {"max_position_embeddings": positions}))
        convert(model, tmp_path / "checkpoint")
        assert default_build_config(tmp_path / "checkpoint") == BuildConfig(max_seq_len=default)
        build(tmp_path / "checkpoint", tmp_path / "engine", BuildConfig(max_seq_len=positions))
        with pytest.raises(ValueError, match=f"max_seq_len={positions + 1} exceeds the model's {positions} positions"):
            build(tmp_path / "checkpoint", tmp_path / "engine", BuildConfig(max_seq_len=positions + 1))


def test_memory_of_an_engine_holds_a_full_batch_of_the_longest_sequences(engine: Path) -> None:
    config = read_engine_config(engine)
    memory, summary = config.memory(), describe(config.model)
    pages = 1 + 3 * 13  # 200 tokens in pages of 16
    assert memory.num_pages == {"full_attention": pages}
    assert memory.page_bytes == pages * 16 * summary.kv_bytes_per_token["full_attention"]
    slots = 1 + 3 + 3  # padding, sequences and as many snapshots of prefixes
    assert (memory.num_slots, memory.state_bytes) == (slots, slots * summary.state_bytes)
    without = config.memory(spare_slots=0)
    assert (without.num_slots, without.state_bytes) == (4, 4 * summary.state_bytes)
    assert (without.groups, without.weight_bytes) == (memory.groups, memory.weight_bytes)
    padding = 64 * len(config.lowered().packed_weights())  # and panels are filled up
    assert summary.weight_bytes <= memory.weight_bytes <= 1.2 * summary.weight_bytes + padding


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: data | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(version="0.0.0"), r"built by hybridtrt 0\.0\.0, this is .*; build it again from its checkpoint"),
        (changed(version=None), "built by hybridtrt None"),
        (lambda data: {key: data[key] for key in ("version", "pretrained_config")}, "is not an engine's: it lacks"),
        (lambda data: [data], "is not an engine's"),
        (changed(pretrained_config=None), "model description is damaged"),
        (changed(pretrained_config={}), "model description is damaged"),
        (changed(build_config=None), "config.json"),
        (changed(build_config={"max_beam_width": 1}), "max_beam_width"),
        (changed(build_config={"max_batch_size": "8"}), "config.json"),
        (changed(build_config={"max_batch_size": 0}), r"max_batch_size=0 is not in 1\.\.4096"),
        (changed(build_config={"max_batch_size": 8.5}), r"max_batch_size=8\.5 is not a whole number"),
        (changed(build_config={"tokens_per_block": True}), "tokens_per_block=True is not a whole number"),
        (changed(build_config={"exclude": [5]}), r"exclude=\[5\] is not a list of patterns"),
        (changed(build_config={"exclude": "head"}), "exclude='head' is not a list of patterns"),
        (changed(tactics={"cpu": "", "isa": "", "threads": math.inf, "products": {}}), "the tactics are damaged"),
        (changed(build_config={"target": "tensorrt_llm"}), "target 'tensorrt_llm' is not known"),
    ],
)
def test_config_that_is_damaged_or_of_another_version(
    engine: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """One line that names the file, whoever opens the engine."""
    path = engine / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message) as error:
        load_runner(engine)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, None], ids=range(5))
def test_config_that_cannot_be_read(engine: Path, content: bytes | None) -> None:
    path = engine / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON|is not an engine: there is no config\.json"):
        read_engine_config(engine)
    assert is_engine(engine) == (content is not None)


def test_weights_that_are_damaged(engine: Path) -> None:
    path = engine / "rank0.engine"
    whole = path.read_bytes()
    for damaged, message in ((whole[:-1], "truncated or damaged"), (whole[: len(whole) // 2], "truncated or damaged")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{engine}: .*{message}.*; build the engine again"):
            load_runner(engine)
    path.unlink()
    assert not is_engine(engine)
    with pytest.raises(ValueError, match=r"no such file.*; build the engine again"):
        load_runner(engine)


def test_what_a_killed_build_left_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    """What is of a process that still runs stays: another build may be at work."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, others = tmp_path / f".engine.{gone.pid}.new", tmp_path / f".engine.{os.getppid()}.new"
    for folder in (left, others):
        folder.mkdir()
    build(checkpoint, tmp_path / "engine", LIMITS)
    assert (left.exists(), others.exists()) == (False, True)


def test_a_pattern_that_names_nothing_is_a_warning(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patterns = ("layers.0.*", "lm_haed.weight", "*norm*")  # norms are no matrices, and never quantised
    expected = [
        "exclude pattern 'lm_haed.weight' matches no matrix",
        "exclude pattern '*norm*' matches no matrix",
    ]
    build(checkpoint, tmp_path / "engine", replace(LIMITS, weights="int8", exclude=patterns))
    assert [record.getMessage() for record in caplog.records] == expected
    caplog.clear()
    build(checkpoint, tmp_path / "engine", replace(LIMITS, exclude=patterns))
    no_effect = "exclude has no effect: without weights in another format all matrices stay as they are"
    assert [record.getMessage() for record in caplog.records] == [no_effect, *expected]


def test_inspect_counts_the_bytes_that_are_stored(checkpoint: Path, tmp_path: Path) -> None:
    """A format of half the bytes saves a decoded token the same share of its matrices that it saves the file."""
    moved, file_bytes = {}, {}
    for weights in ("float32", "bfloat16", "int8", "int4"):
        engine = tmp_path / weights
        build(checkpoint, engine, replace(LIMITS, weights=weights))
        moved[weights] = inspect(engine).decode_bytes
        file_bytes[weights] = (engine / "rank0.engine").stat().st_size
    assert moved["float32"] > moved["bfloat16"] > moved["int8"] > moved["int4"]
    saved = {weights: moved["float32"] - moved[weights] for weights in ("bfloat16", "int8", "int4")}
    assert saved["int8"] / saved["bfloat16"] == pytest.approx(
        (file_bytes["float32"] - file_bytes["int8"]) / (file_bytes["float32"] - file_bytes["bfloat16"]), rel=0.1
    )
