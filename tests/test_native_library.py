"""The compiled library: what it refuses, how it is compiled, and programs of several nodes, threads and step sizes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridtrt.plugins.native import compile as compiler
from hybridtrt.plugins.native import library
from hybridtrt.plugins.native.library import ISAS, Node, Operand, Pool, Program, Weight, load_library, supported_isas
from hybridtrt.plugins.step import StepBatch

WIDTH = 24  # numbers a token
X = Operand("T", 0, 0, 32, (WIDTH,))
Y = Operand("T", 32, 4, 32, (WIDTH,))  # another buffer, from column 4 on
OUT = Operand("output", 0, 0, WIDTH, (WIDTH,))
ARENA = 64
RNG = np.random.default_rng(0)
TABLE, CONV = (RNG.standard_normal(shape).astype(np.float32) for shape in ((11, WIDTH), (WIDTH, 3)))


def weight(array: NDArray[np.float32]) -> Weight:
    return Weight(array.view(np.uint8), "float32", array.shape)


def nodes(state: NDArray[np.float32]) -> list[Node]:
    """The embedding of each token, its convolution, and both together for the last tokens."""
    ids = Operand("input_ids", 0, 0, 1, ())
    rows = [Operand("R", offset, 0, 32, (WIDTH,)) for offset in (0, 32)]
    pool = Pool(state, "float32")
    return [
        Node("embedding", (ids,), (X,), (weight(TABLE),), (), ()),
        Node("causal_conv", (X,), (Y,), (weight(CONV), None), (pool,), (np.nan,)),
        Node("gather_rows", (X,), (rows[0],), (), (), ()),
        Node("gather_rows", (Y,), (rows[1],), (), (), ()),
        Node("add", (rows[0], rows[1]), (OUT,), (), (), (2.0,)),
    ]


def batch(lengths: list[int], rng: np.random.Generator) -> StepBatch:
    count = len(lengths)
    slots = np.arange(1, count + 1, dtype=np.int32)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    return StepBatch(
        input_ids=rng.integers(0, len(TABLE), sum(lengths)).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        cu_seqlens=ends,
        context_lens=np.zeros(count, np.int32),
        state_src=slots,
        state_dst=slots,
        logits_indices=ends[1:] - 1,
    )


def expected(step: StepBatch, state: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the program gives; `state` is advanced."""
    out = np.zeros((step.num_sequences, WIDTH))
    for row, slot in enumerate(step.state_dst):
        x = TABLE[step.input_ids[step.cu_seqlens[row] : step.cu_seqlens[row + 1]]].astype(float)
        padded = np.concatenate([state[slot].T, x])
        out[row] = x[-1] + 2 * (padded[-3:].T * CONV).sum(1)
        state[slot] = padded[-2:].T
    return out


def state_pool(slots: int = 9) -> NDArray[np.float32]:
    return np.zeros((slots, WIDTH, 2), np.float32)


def program(state: NDArray[np.float32], threads: int = 1, poison: bool = True, isa: str | None = None) -> Program:
    return Program(nodes(state), ARENA, ARENA, (), threads, isa, poison)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", supported_isas())
def test_steps_of_any_size_one_after_another(isa: str, threads: int) -> None:
    """The arena grows and shrinks, threads wait and wake, and no step sees what another left."""
    rng = np.random.default_rng(threads)
    state, exact = state_pool(), state_pool()
    running = program(state, threads, isa=isa)
    assert running.isa == isa
    sizes = [[1], [3, 1], [1] * 8, [40], [2], [300, 1, 5], [1], [700], [1, 1]]
    for lengths in sizes * 3:
        step = batch(lengths, rng)
        np.testing.assert_allclose(running.step(step, WIDTH), expected(step, exact), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(state, exact)
    assert running.working_bytes >= 700 * ARENA * 4
    running.close()


def test_threads_give_the_same_bits() -> None:
    found = []
    for threads in (1, 2, 3):
        rng, state = np.random.default_rng(7), state_pool()
        running = program(state, threads)
        found.append(np.concatenate([running.step(batch([5, 1, 77], rng), WIDTH) for _ in range(3)]))
        running.close()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_poison_is_in_all_that_nobody_wrote() -> None:
    state = state_pool()
    running = program(state)
    step = batch([3, 2], np.random.default_rng(0))
    running.step(step, WIDTH)
    np.testing.assert_array_equal(running.value(X, 5, 2, ARENA), TABLE[step.input_ids])
    whole = replace(Y, column=0, dims=(32,))
    left, right = np.split(running.value(whole, 5, 2, ARENA), [4], axis=1)
    assert np.isnan(left).all()
    assert np.isnan(right[:, WIDTH:]).all()
    assert np.isfinite(right[:, :WIDTH]).all()
    rows = running.value(Operand("R", 0, 0, 32, (32,)), 5, 2, ARENA)
    assert np.isfinite(rows[:, :WIDTH]).all()
    assert np.isnan(rows[:, WIDTH:]).all()
    running.close()
    unread = Program([nodes(state)[4]], ARENA, ARENA, (), 1, poison=True)  # adds rows that no node wrote
    assert np.isnan(unread.step(step, WIDTH)).all()
    unread.close()


def test_times_of_nodes() -> None:
    running = program(state_pool(), threads=2)
    step = batch([200], np.random.default_rng(0))
    running.step(step, WIDTH)
    assert running.times().tolist() == [0] * 5
    running.profile(True)
    for _ in range(3):
        running.step(step, WIDTH)
    times = running.times()
    assert (times > 0).all()
    running.step(step, WIDTH)
    assert (running.times() > times).all()
    running.profile(False)
    assert running.times().tolist() == [0] * 5
    running.close()


def test_close_twice_and_programs_side_by_side() -> None:
    states = [state_pool() for _ in range(3)]
    programs = [program(state, threads=2) for state in states]
    for running in programs:
        running.step(batch([4], np.random.default_rng(0)), WIDTH)
    np.testing.assert_array_equal(states[0], states[2])
    for running in [*programs, *programs]:
        running.close()
    del programs


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="instruction set 'avx1024' is not known; known: base, avx2, avx512"):
        program(state_pool(), isa="avx1024")
    for isa in {*ISAS} - {*supported_isas()}:
        with pytest.raises(ValueError, match=f"this machine does not run {isa}; it runs base"):
            program(state_pool(), isa=isa)
    with pytest.raises(ValueError, match="there is no kernel of op fuse"):
        Program([Node("fuse", (), (), (), (), ())], 0, 0, (), 1)


def test_library_that_is_missing_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRIDTRT_LIBRARY", raising=False)
    with pytest.raises(ValueError, match=r"lib.so is missing: the C\+\+ kernels were not compiled"):
        load_library(tmp_path / "lib.so")
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(ValueError, match=r"lib.so does not load"):
        load_library(tmp_path / "lib.so")
    code = "from hybridtrt.plugins.native.library import load_library; load_library()"
    environment = {**os.environ, "HYBRIDTRT_LIBRARY": str(tmp_path / "other.so")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1].startswith(f"ValueError: {tmp_path}/other.so is missing")


@pytest.mark.skipif(not shutil.which("nm"), reason="nm is missing")
@pytest.mark.skipif(library.LIBRARY.suffix != ".so", reason="no ELF")
def test_kernels_share_no_function_between_instruction_sets() -> None:
    """A weak symbol would be merged by the linker, and code for one machine would run on another."""
    objects = sorted(compiler.HERE.parents[1].glob(".cache/native/*.o"))
    if not objects:
        pytest.skip("compiled elsewhere: no objects are kept here")
    newest: dict[str, list[Path]] = {}  # of each source, one for each instruction set
    for path in sorted(objects, key=lambda path: -path.stat().st_mtime):
        newest.setdefault(path.name.rsplit("-", 1)[0], []).append(path)
    once = {f"{source.parent.name}-{source.stem}" for source in compiler.COMPILED_ONCE}
    assert once < newest.keys()
    for name in newest.keys() - once:
        for path in newest[name][: len(ISAS)]:
            lines = symbols(path)
            assert not [line for line in lines if re.match(r"[0-9a-f]+ [WVu] ", line)], path
            assert len({isa for isa in ISAS for line in lines if f"hybridtrt::{isa}::" in line}) == 1, path


def symbols(path: Path) -> list[str]:
    return subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()


def test_compiler_that_fails_or_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, objects = tmp_path / "out.so", tmp_path / "objects"
    for command, message in (("/bin/false", "/bin/false"), (str(tmp_path / "none"), "No such file")):
        with patch.dict(os.environ, CXX=command):
            with pytest.raises(compiler.CompileError, match=message):
                compiler.compile_library(output, objects)
            assert compiler.main(["--output", str(output), "--objects", str(objects)]) == 1
            assert capsys.readouterr().err.startswith("error: ")
    nowhere = patch.dict(os.environ, {"PATH": str(tmp_path), "CXX": ""})
    with nowhere, pytest.raises(compiler.CompileError, match=r"no C\+\+ compiler found"):
        compiler.find_compiler()
    assert not output.exists()


def test_compiler_of_the_environment_with_its_options() -> None:
    with patch.dict(os.environ, CXX="ccache g++ -g"):
        assert compiler.find_compiler() == ["ccache", "g++", "-g"]


def test_help_of_the_compile_script() -> None:
    script = [sys.executable, str(Path(compiler.__file__)), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "--sanitize" in done.stdout
    assert "once for each instruction set" in done.stdout


def test_installation_without_a_compiler_is_one_on_torch(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    root = compiler.HERE.parents[1]
    if not (root / "setup.py").is_file():
        pytest.skip("installed without its sources")
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path),
    ]
    environment = {**os.environ, "CXX": "/bin/false"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning: the C++ kernels were not compiled; models will run on torch: /bin/false" in done.stderr
    assert not list(tmp_path.rglob("*.so"))
