"""compare.py and its parts: workers, ratios of turns, the table, and charts."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from engines import tiny_engine

from hybridtrt.runtime.limits import Limits

FOLDER = Path(__file__).parents[1] / "benchmarks"
LIMITS = Limits(2, "avx2", 20.0, 200.0, 18.0, 190.0)
WORKER = """
import sys
from itertools import pairwise
from protocol import serve

def load():
    print("loading")
    return 50, lambda prompts, new: {"prefill_s": 0.5, "decode_s": 1.0, "decode_tokens": new, "tokens": prompts[0]}

serve(load)
"""


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    import compare

    return compare


@pytest.fixture
def processes(compare: ModuleType) -> ModuleType:
    import processes

    return processes


def start(processes: ModuleType, folder: Path, source: str) -> Any:
    path = folder / "worker.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER / 'peers')!r})\n{source}", encoding="utf-8")
    return processes.Worker([sys.executable, str(path)], 1)


def test_a_worker_does_jobs(processes: ModuleType, tmp_path: Path) -> None:
    worker = start(processes, tmp_path, WORKER)
    answers = [worker.run(processes.Job(2, length, 3)) for length in (4, 6)]
    worker.close()
    assert [len(answer["tokens"]) for answer in answers] == [4, 6]
    assert answers[0]["tokens"] == answers[1]["tokens"][:4]
    assert all(3 <= token < 50 for token in answers[1]["tokens"])
    assert answers[0]["decode_tokens"] == 3
    assert answers[0]["peak_rss_mb"] > 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit('no such luck')", "ended with status 1: no such luck"),
        ("from protocol import serve\ndef load():\n    raise ValueError('a\\nb')\nserve(load)", "ValueError: a b"),
        ("import os\nos.abort()", "ended with status -6"),
    ],
)
def test_a_worker_that_does_not_start_says_why(processes: ModuleType, tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(processes.WorkerError, match=words):
        start(processes, tmp_path, source)


def test_a_worker_that_ends_in_a_job_says_why(processes: ModuleType, tmp_path: Path) -> None:
    worker = start(processes, tmp_path, WORKER.replace('"prefill_s": 0.5', '"prefill_s": 1 // 0'))
    with pytest.raises(processes.WorkerError, match="ZeroDivisionError"):
        worker.run(processes.Job(1, 2, 3))
    worker.close()


def test_our_worker_runs_an_engine(processes: ModuleType) -> None:
    command = [sys.executable, str(FOLDER / "peers/hybridtrt_worker.py"), str(tiny_engine("qwen3_next")), "1"]
    worker = processes.Worker(command, 1)
    answer, longer = worker.run(processes.Job(2, 5, 4)), worker.run(processes.Job(2, 5, 8))
    worker.close()
    assert len(answer["tokens"]) == 4
    assert answer["tokens"] == longer["tokens"][:4]
    assert answer["decode_tokens"] == 6
    assert min(answer["prefill_s"], answer["decode_s"], answer["decode"]["gb_per_s"] + 1e-9) > 0


def test_prompts_are_those_of_the_generator_in_c(compare: ModuleType) -> None:
    import protocol

    state, expected = 1, []
    for _ in range(6):
        state = (state * 1103515245 + 12345) & 0xFFFFFFFF
        expected.append(3 + (state >> 8) % 47)
    assert protocol.prompts(2, 3, 50) == [expected[:3], expected[3:]]


def answers(compare: ModuleType, job: Any, seconds: list[float], tokens: list[int]) -> list[dict[str, Any]]:
    achieved = {"gb_per_s": 10.0, "gflop_per_s": 50.0}
    return [
        {
            "prefill_s": second,
            "decode_s": 2 * second,
            "decode_tokens": 30,
            "peak_rss_mb": 100.0 * second,
            "tokens": tokens,
            "prefill": achieved,
            "decode": achieved,
        }
        for second in seconds
    ]


def test_ratios_are_those_of_turns(compare: ModuleType) -> None:
    """The machine is half as fast in the second turn, which the ratio does not see."""
    job = compare.Job(2, 60, 16)
    asked = [compare.Measure("prefill", job, "prefill"), compare.Measure("decode", job, "decode")]
    found = {
        compare.OURS: compare.Found({job: answers(compare, job, [1.0, 2.0, 1.0], [1, 2, 3])}),
        "llama.cpp": compare.Found({job: answers(compare, job, [3.0, 6.0, 3.0], [1, 2, 4])}),
        "vllm": compare.Found(failed="start: no"),
    }
    prefill, decode = compare.summarise(Path("some/model"), "int8", asked, found, LIMITS)
    ours, llama = prefill["engines"][compare.OURS], prefill["engines"]["llama.cpp"]
    assert (prefill["model"], prefill["weights"]) == ("model", "int8")
    assert (ours["tokens_per_s"], ours["all"]) == (120.0, [120.0, 60.0, 120.0])
    assert (ours["memory_share"], ours["compute_share"], ours["peak_rss_mb"]) == (0.5, 0.25, 200.0)
    assert (llama["tokens_per_s"], llama["same_greedy_tokens"]) == (40.0, "2 of 3")
    assert prefill["ratio"] == {"llama.cpp": 3.0}
    assert decode["engines"][compare.OURS]["tokens_per_s"] == 15.0
    lines = compare.table([prefill, decode]).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:6] == ["model", "int8", "prefill", "120.0", "10.0", "50%"]
    assert "failed" in lines[1]
    assert "3.00" in lines[1]


def test_a_failed_engine_of_ours_still_shows_the_peers(compare: ModuleType) -> None:
    job = compare.Job(1, 4, 3)
    asked = [compare.Measure("decode", job, "decode")]
    found = {
        compare.OURS: compare.Found(failed="start: no"),
        "llama.cpp": compare.Found({job: answers(compare, job, [1.0], [1])}),
    }
    (row,) = compare.summarise(Path("m"), "float32", asked, found, LIMITS)
    assert row["ratio"] == {}
    assert compare.table([row]).splitlines()[1].split()[:4] == ["m", "float32", "decode", "failed"]


def test_measures_share_jobs(compare: ModuleType) -> None:
    args = compare.make_parser().parse_args(["model", "--prompt", "32", "--long-prompt", "64", "--new", "8"])
    asked = compare.measures(args)
    names = ["prefill b1 x 32", "prefill b1 x 64", "decode b1", "prefill b8 x 32", "decode b8"]
    assert [measure.name for measure in asked] == names
    assert len({measure.job for measure in asked}) == 3


def test_peers_that_compare(compare: ModuleType) -> None:
    import contenders

    def setup(**changes: Any) -> Any:
        return compare.Setup(**{"cache": Path(), "threads": 1, "weights": "float32", "limits": {}, **changes})

    assert "llama.cpp" not in compare.available(setup())
    everywhere = ["llama.cpp", "transformers"]
    for weights, peers in {"int8": everywhere, "bfloat16_rounded": [*everywhere, "vllm"]}.items():
        assert compare.available(setup(weights=weights, llama=Path("x"), vllm_python="python")) == peers
    assert set(contenders.PEERS) == {"llama.cpp", "transformers", "vllm"}


def test_ticks_are_round_and_reach_the_top(compare: ModuleType) -> None:
    import chart

    assert chart.ticks(8000) == [0, 2000, 4000, 6000, 8000]
    for most in (0.03, 0.7, 1, 3.3, 49, 51, 1234):
        found = chart.ticks(most)
        assert found[0] == 0
        assert found[-1] >= most * (1 - 1e-9)
        assert 3 <= len(found) <= 7
        assert all(math.isclose(b - a, found[1]) for a, b in pairwise(found))


def test_a_chart_has_a_line_for_each_name(compare: ModuleType) -> None:
    import chart

    panels = [
        chart.Panel("one <model>", [1, 2, 4], {"a": [1, 2, 3], "b": [3, 2, 0.5]}),
        chart.Panel("another", [1, 2, 4], {"b": [1, 1, 1]}),
    ]
    root = ElementTree.fromstring(chart.line_chart(panels, "x & y", "ms"))
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    assert [len(line.get("points", "").split()) for line in lines] == [3, 3, 3]
    assert lines[1].get("stroke") == lines[2].get("stroke") != lines[0].get("stroke")
    assert {"one <model>", "another", "x & y", "ms"} <= {node.text for node in root.iter()}


def test_lengths_are_measured_kind_by_kind(compare: ModuleType) -> None:
    import context

    found = context.measure(tiny_engine("qwen3_next"), [8, 32], 2, 1, 2)
    assert [one["context"] for one in found] == [8, 32]
    assert {"attention", "gated_delta", "moe"} <= set(found[0]["kinds"])
    for one in found:
        assert one["milliseconds"] > 0
        assert all(kind["milliseconds"] > 0 for kind in one["kinds"].values())
    assert context.table(found).splitlines()[1].startswith(context.WHOLE)
    assert set(context.panel("m", found).lines) == {context.WHOLE, *found[0]["kinds"]}
    with pytest.raises(ValueError, match="too small for lengths"):
        context.measure(tiny_engine("qwen3_next"), [8, 1000], 2, 1, 1)
