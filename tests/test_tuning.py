"""Tactics give the same bits; the fastest is found and used where it was measured, and nowhere else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import LIMITS
from numpy.typing import NDArray
from steps import make_batch, place

from hybridtrt.build import measuring, tactics, tuning
from hybridtrt.build.build import build
from hybridtrt.build.engine import BuildConfig, read_engine_config
from hybridtrt.build.inspect import inspect
from hybridtrt.build.measuring import Question, Stream, is_faster, measure
from hybridtrt.build.tactics import Machine, Product, Tuned
from hybridtrt.build.timing_cache import TimingCache
from hybridtrt.build.tuning import Tuner, worth_tuning
from hybridtrt.cli import main
from hybridtrt.converters.convert import convert
from hybridtrt.plugins.linear.packing import pack
from hybridtrt.plugins.linear.panel_layout import GROUPS
from hybridtrt.plugins.native.library import TACTIC_RANGES, Node, Operand, Program, Weight, supported_isas
from hybridtrt.plugins.native.one_op import run_one
from hybridtrt.plugins.native.tactics import DEFAULT, kernel_digest, known_tactics, range_of
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime import cpu_runner
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import RuntimeOptions, load_runner

FORMATS = [(form, group) for form, groups in GROUPS.items() for group in groups]
N, K = 45, 645
IDS = list(range(1, 41))
Build = Callable[..., Path]


def tokens(count: int) -> StepBatch:
    return make_batch([(0, 0, count)], [[1] * count], place([count], 32, np.random.default_rng(0)))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def products(packed: NDArray[np.uint8], form: str, group: int, rows: int, isa: str) -> NDArray[np.float32]:
    """`[tactics, rows, N]`: the same product by every tactic."""
    names = known_tactics().names
    x, bias, y = (
        numbers(rows, K).numpy(),
        numbers(N, seed=2).numpy(),
        np.full((len(names), rows, N), np.nan, np.float32),
    )
    given = Operand("external_T", x.ctypes.data, 0, K, (K,))
    nodes = [
        Node(
            "linear",
            (given,),
            (Operand("external_T", y[i].ctypes.data, 0, N, (N,)),),
            (Weight(packed, form, (N, K), group, (i,) * TACTIC_RANGES), Weight(bias.view(np.uint8), "float32", (N,))),
            (),
            (),
        )
        for i in range(len(names))
    ]
    program = Program(nodes, 0, 0, (), 1 + rows % 3, isa, poison=True)
    program.step(tokens(rows), 1)
    program.close()
    return y


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_every_tactic_gives_the_same_bits(isa: str, form: str, group: int) -> None:
    packed = pack(numbers(N, K, seed=1), form, group)
    for rows in (*range(1, 41), 49, 75, 300):
        found = products(packed, form, group, rows, isa)
        assert np.isfinite(found).all()
        for name, y in zip(known_tactics().names, found, strict=True):
            np.testing.assert_array_equal(y, found[0], f"{name}, rows {rows}")


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_experts_by_every_tactic(isa: str, form: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDTRT_ISA", isa)
    hidden, inner, experts, count, choices = 130, 70, 3, 150, 2
    up, down = numbers(experts, 2 * inner, hidden), numbers(experts, hidden, inner, seed=1)
    chosen = torch.randint(0, experts, (count, choices), generator=torch.Generator().manual_seed(0))
    found = [
        run_one(
            op_spec("experts"),
            Step(tokens(count)),
            numbers(count, hidden),
            numbers(count, choices),
            chosen,
            panel=form,
            group=group,
            tactic=i,
            threads=2,
            up=up,
            down=down,
            activation="silu",
            gated=True,
        )
        for i in range(len(known_tactics().names))
    ]
    assert all(torch.equal(y, found[0]) for y in found)


def test_ranges_of_rows() -> None:
    known = known_tactics()
    assert [range_of(rows) for rows in (1, 2, 6, 7, 12, 13, 48, 49, 1 << 30)] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [range_of(rows) for rows in known.typical_rows] == list(range(TACTIC_RANGES))
    assert known.names[0] == DEFAULT
    assert len(set(known.names)) == len(known.names)
    assert {name for names in known.worth_trying for name in names} == set(known.names)
    for names in known.worth_trying:
        assert names[0] == DEFAULT
        assert len(names) > 1


@pytest.mark.parametrize(
    ("default", "other", "verdict"),
    [
        ([10, 10, 10, 10], [9, 9, 9, 9], True),
        ([10, 50, 90, 10], [70, 9, 9, 80], True),  # what other work adds does not count
        ([10, 10, 10, 10], [9.9, 9.9, 9.9, 9.9], False),  # less than what is worth it
        ([10, 10, 9.2, 9.2], [9.1, 9.1, 9.1, 9.1], False),  # less than what the default differs from itself
        ([10, 10, 10, 10], [11, 11, 11, 11], False),
        ([10, 10, 12, 12], [5, 5, 5, 5], None),
        ([10, 10, 10, 10], [5, 5, 6, 6], None),
    ],
)
def test_what_is_faster_by_more_than_the_noise(default: list[float], other: list[float], verdict: bool | None) -> None:
    assert is_faster(np.array([default, other]).T) is verdict


def test_times_of_products(tmp_path: Path) -> None:
    """In the order of the tactics, whatever the order in which they ran; the weights are any bytes."""
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(300_000))
    question, machine = Question(Product("panel_int8", 32, 64, 256), 1), Machine.here(2)
    times = measure(question, known_tactics().worth_trying[1], 3, Stream(tmp_path / "file"), machine)
    assert times.shape == (3, len(known_tactics().worth_trying[1]))
    assert ((times > 0) & (times < 60)).all()


def test_a_stream_begins_anew_where_it_ends(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    data.tofile(tmp_path / "file")
    stream = Stream(tmp_path / "file")
    assert stream.scale == 1
    first, second, third = stream.take(600_001), stream.take(300_000), stream.take(300_000)
    np.testing.assert_array_equal(first, data[:600_001])
    np.testing.assert_array_equal(second, data[600_064:900_064])
    np.testing.assert_array_equal(third, data[:300_000])
    with (tmp_path / "file").open("ab") as file:
        file.write(b"0")
    assert Stream(tmp_path / "file").scale == 2


def seconds_of(costs: Mapping[str, float]) -> Callable[..., NDArray[np.float64]]:
    """A `measure` of a machine on which tactics take these seconds, and others 1."""

    def measured(question: Question, tactics: Sequence[str], rounds: int, *_: object) -> NDArray[np.float64]:
        return np.tile([costs.get(name, 1.0) for name in tactics], (rounds, 1))

    return measured


@pytest.mark.parametrize(
    ("costs", "budget", "best"),
    [
        ({"ahead 0": 0.9, "cached": 0.8}, 1e3, "cached"),
        ({"ahead 0": 0.99}, 1e3, DEFAULT),
        ({DEFAULT: 0.9}, 1e3, DEFAULT),
        ({"cached": 0.8}, 60.0, None),  # for fewer rounds than it takes
        ({"cached": 0.8}, -1.0, None),
    ],
)
def test_the_fastest_is_taken(
    costs: dict[str, float], budget: float, best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure", seconds_of(costs))
    question: Any = Question(Product("panel_int8", 0, 64, 64), 0)
    assert measuring.fastest(question, None, None, budget) == best  # type: ignore[arg-type]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny engines are worth it."""
    monkeypatch.setattr(tuning, "LEAST_BYTES", 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Instead of measuring: few rows are fastest with "cached", and what was asked is noted."""
    found: list[Question] = []

    def fastest(question: Question, *_: object) -> str:
        found.append(question)
        return "cached" if question.rows < 2 else DEFAULT

    monkeypatch.setattr(tuning, "fastest", fastest)
    return found


@pytest.fixture
def built(tmp_path: Path) -> Build:
    """Builds an engine of a tiny model and returns its folder."""
    convert(tiny_checkpoint("qwen3_next"), tmp_path / "checkpoint")

    def make(name: str = "engine", limits: BuildConfig = LIMITS, threads: int = 1, **options: Any) -> Path:
        lines = options.pop("lines", [])
        tuner = Tuner(threads, 5.0, TimingCache(options.pop("cache", tmp_path / "timing.json")), lines.append)
        build(tmp_path / "checkpoint", tmp_path / name, limits, tune=tuner)
        return tmp_path / name

    return make


def tuned(engine: Path) -> Tuned:
    found = read_engine_config(engine).tuned
    assert found is not None
    return found


def test_tiny_engines_are_not_tuned(built: Build, asked: list[Question], tmp_path: Path) -> None:
    engine = built()
    assert not asked
    assert not (tmp_path / "timing.json").exists()
    assert "tactics" not in json.loads((engine / "config.json").read_text())
    assert "kernel tactics        the defaults" in inspect(engine).render()


@pytest.mark.usefixtures("small")
def test_every_product_is_tuned_once(built: Build, asked: list[Question], tmp_path: Path) -> None:
    lines: list[str] = []
    limits = replace(LIMITS, weights="int8", exclude=("lm_head.weight",))  # at most 8 rows of logits
    engine = built(limits=limits, lines=lines)
    config, found = read_engine_config(engine), tuned(engine)
    assert found.machine == Machine.here(1)
    assert found.products.keys() == {str(product) for product in worth_tuning(config)}
    head = str(Product("panel_float32", 0, config.model.vocab_size, config.model.hidden_size))
    for name, chosen in found.products.items():
        assert chosen == ("cached", "cached", DEFAULT, DEFAULT, DEFAULT)
        assert {question.rows for question in asked if str(question.product) == name} == set(
            range(3 if name == head else 5)
        )
    assert len(asked) == len(set(asked)) == 5 * len(found.products) - 2
    assert [question.rows for question in asked] == sorted(question.rows for question in asked)
    better = 2 * len(found.products)
    assert lines == [
        f"{len(asked)} of {len(asked)} kernel choices are measured, at most 5 s",
        f"{better} of {len(asked)} are not the default",
    ]
    shown = f"{better} of {5 * len(found.products)} not the default, measured on {Machine.here(1)}"
    assert f"kernel tactics        {shown}" in inspect(engine).render().splitlines()
    assert inspect(engine).to_dict()["tactics"] == found.to_dict()

    before, _ = list(asked), (asked.clear(), lines.clear())
    assert tuned(built("again", limits)) == found  # from the cache
    assert not asked
    assert not lines
    built("more threads", limits, threads=2)
    assert asked == before
    asked.clear()
    built("elsewhere", limits, cache=tmp_path / "other" / "timing.json")
    assert asked == before


@pytest.mark.usefixtures("small")
def test_other_kernels_are_measured_anew(built: Build, asked: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_digest() == kernel_digest()
    built()
    count = len(asked)
    monkeypatch.setattr(tuning, "kernel_digest", lambda: "other")
    built("other")
    assert len(asked) == 2 * count


@pytest.mark.usefixtures("small")
def test_what_could_not_be_told_is_the_default_and_is_asked_again(
    built: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(tuning, "fastest", lambda *_: None)
    found = tuned(built(lines=lines))
    assert {name for chosen in found.products.values() for name in chosen} == {DEFAULT}
    count = int(lines[0].split()[0])
    assert lines[1] == f"0 of 0 are not the default, {count} could not be told in this time"
    built(lines=lines)
    assert lines[2:] == lines[:2]


@pytest.mark.usefixtures("small")
def test_an_engine_is_measured_where_its_kernels_run(built: Build) -> None:
    """With real times, of which nothing is known but that each product has a tactic for each range."""
    for chosen in tuned(built(limits=replace(LIMITS, weights="int4"), threads=2)).products.values():
        for which, name in enumerate(chosen):
            assert name in known_tactics().worth_trying[which]


@pytest.mark.usefixtures("small", "asked")
def test_tactics_reach_the_kernels_and_change_no_bit(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = built(threads=2), []

    def program(nodes: Sequence[Node], *others: Any) -> Program:
        seen.append([weight.tactics for node in nodes for weight in node.weights if weight is not None])
        return Program(nodes, *others)

    monkeypatch.setattr(cpu_runner, "Program", program)
    logits = {}
    for threads in (1, 2):
        runner = load_runner(engine, RuntimeOptions(threads=threads))
        logits[threads] = full_logits(runner, IDS)
        runner.close()
    np.testing.assert_array_equal(logits[1], logits[2])
    cached = known_tactics().names.index("cached")
    assert set(seen[0]) == {()}  # of another number of threads
    assert set(seen[1]) == {(), (cached, cached, 0, 0, 0)}


@pytest.mark.usefixtures("small", "asked")
@pytest.mark.parametrize("change", [{"cpu": "Z80"}, {"isa": "mmx"}, {"threads": 7}])
def test_tactics_of_another_machine_are_ignored(
    built: Build, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = built()
    path = engine / "config.json"
    data = json.loads(path.read_text())
    data["tactics"] |= change
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.DEBUG, "hybridtrt.load"):
        runner = load_runner(engine, RuntimeOptions(threads=1))
    full_logits(runner, IDS)
    runner.close()
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert f"are not used on {Machine.here(1)}" in record.getMessage()


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {"cpu": "Z80", "isa": "avx2", "threads": 2},
        {"cpu": "Z80", "isa": "avx2", "threads": 2, "products": [1]},
        {"cpu": "Z80", "isa": "avx2", "threads": 2, "products": {"panel_int8 4x4": ["default"]}},
        {"cpu": "Z80", "isa": "avx2", "threads": 2, "products": {"panel_int8 4x4": 5}},
        {"cpu": "Z80", "isa": "avx2", "threads": "two", "products": {}},
    ],
)
def test_damaged_tactics(built: Build, damaged: object) -> None:
    path = built() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tactics": damaged}))
    with pytest.raises(ValueError, match=r"config\.json: (the tactics are damaged|panel_int8 4x4 has 1 tactics)"):
        read_engine_config(path.parent)


@pytest.mark.usefixtures("small", "asked")
def test_a_tactic_that_is_not_known_is_the_default(built: Build) -> None:
    engine = built()
    found = tuned(engine)
    strange = replace(found, products=dict.fromkeys(found.products, ("warp", "streamed", *[DEFAULT] * 3)))
    for weight in read_engine_config(engine).lowered().packed_weights().values():
        expected = (0, known_tactics().names.index("streamed"), 0, 0, 0)
        assert strange.indices(weight) == (expected if str(weight.stored.format).startswith("panel_") else ())


@pytest.mark.usefixtures("small")
def test_without_kernels_nothing_is_tuned(built: Build, asked: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Machine:
        raise ValueError("the kernels were not compiled")

    monkeypatch.setattr(Machine, "here", missing)
    assert read_engine_config(built()).tuned is None
    assert not asked


def test_name_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(tactics, "CPU_INFO", info)
    assert Machine.here(3, "base").cpu == Machine.here(3, "base").cpu != ""
    info.write_text("cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A: B\n\ncpu family\t: 7\nmodel name\t: C\n")
    assert Machine.here(3, "base") == Machine("A: B family 6 model 85", "base", 3)


@pytest.mark.usefixtures("small")
def test_options_of_build(
    built: Build,
    asked: list[Question],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    command = ["build", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "engine")]
    assert main([*command, "--no-tune"]) == 0
    assert not asked
    assert "tune: " not in capsys.readouterr().err
    assert read_engine_config(tmp_path / "engine").tuned is None
    assert main([*command, "--tune-seconds", "3.5"]) == 0
    assert tuned(tmp_path / "engine").machine.threads == 2
    assert "kernel choices are measured, at most 3.5 s" in capsys.readouterr().err
    assert (tmp_path / "caches/hybridtrt/timing.json").is_file()
    assert main([*command, "--timing-cache", str(tmp_path / "mine.json")]) == 0
    assert (tmp_path / "mine.json").read_bytes() == (tmp_path / "caches/hybridtrt/timing.json").read_bytes()
