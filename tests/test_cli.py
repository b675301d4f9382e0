"""The command line, in process: what each command prints, writes and returns, and one line for whatever is wrong."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import TEXT_VOCAB, TINY, random_model, save, tiny_checkpoint, tiny_model, tiny_text_checkpoint
from engines import oracle_logits
from safetensors.torch import load_file, save_file

import hybridtrt.build.inspect
import hybridtrt.model_repo.supervisor
import hybridtrt.progress
import hybridtrt.runtime.bench
import hybridtrt.runtime.generate
from hybridtrt.build.engine import BuildConfig, read_engine_config
from hybridtrt.cli import main
from hybridtrt.converters.checkpoint import load_checkpoint
from hybridtrt.converters.describe import describe, render
from hybridtrt.model_repo.supervisor import ServeOptions
from hybridtrt.runtime import load as load_module
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import SamplingParams
from hybridtrt.runtime.run_options import RunOptions
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.tokenizer import load_tokenizer
from hybridtrt.runtime.verify import THRESHOLDS, agreeing_tokens

FAMILY = "jamba"
LIMITS = {"max_batch_size": 3, "max_num_tokens": 64, "max_seq_len": 128, "tokens_per_block": 16}
OPTIONS = {
    "convert": ("--output", "--dtype", "--dry-run", "--json"),
    "build": (
        "--output",
        "--target",
        "--max-batch-size",
        "--max-num-tokens",
        "--max-seq-len",
        "--tokens-per-block",
        "--moe-capacity-factor",
        "--moe-overflow",
        "--json",
    ),
    "inspect": ("--json",),
    "generate": ("--prompt", "--input-ids", "--max-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--json"),
    "verify": ("--threshold", "--report", "--json"),
    "routing": ("--text", "--context", "--chunk", "--html", "--threads", "--json"),
    "bench": ("--batch", "--prompt", "--new", "--threads", "--profile", "--json"),
    "serve": ("--http-port", "--grpc-port", "--metrics-port", "--state-dir", "--drain-seconds", "--swap-bytes"),
}


@dataclass(frozen=True)
class Folders:
    """One model at every stage of the pipe, and its engine without the tokenizer."""

    model: Path
    checkpoint: Path
    engine: Path
    bare_engine: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("cli")
    made = Folders(tiny_text_checkpoint(FAMILY), root / "checkpoint", root / "engine", root / "bare-engine")
    limits = [word for name, value in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["convert", str(made.model), "-o", str(made.checkpoint)]) == 0
    assert main(["build", str(made.checkpoint), "-o", str(made.engine), *limits]) == 0
    shutil.copytree(made.engine, made.bare_engine)
    shutil.rmtree(made.bare_engine / "tokenizer")
    return made


@dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on standard output."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command."""

    def run(*words: object) -> Done:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:  # argparse's way out
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return Done(status, printed.out, printed.err)

    return run


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_convert(command: Run, tmp_path: Path, dtype: str | None) -> None:
    """The layer table on standard output, as text or JSON; progress on standard error."""
    words = ["convert", tiny_checkpoint(FAMILY), "-o", tmp_path / "out", *(["--dtype", dtype] if dtype else [])]
    text, data = command(*words), command(*words, "--json")
    summary = describe(load_checkpoint(tmp_path / "out").config)
    assert summary.dtype == (dtype or "float32")
    assert text.out.startswith(render(summary) + "\n")
    assert text.out.splitlines()[-1].endswith(str(tmp_path / "out"))
    assert data.json == summary.to_dict()
    megabytes = f"{summary.weight_bytes / 1e6:.0f}"
    for done in (text, data):
        assert done.status == 0
        assert done.err.splitlines()[-1].startswith(f"convert: {megabytes} of {megabytes} MB, ")


@pytest.mark.parametrize("name", LIMITS)
def test_build_takes_each_limit(command: Run, folders: Folders, tmp_path: Path, name: str) -> None:
    """One limit asked for, the others by default; the engine says what was built, and so does the output."""
    words = ["build", folders.checkpoint, "-o", tmp_path / "engine", f"--{name.replace('_', '-')}", 33]
    text, data = command(*words), command(*words, "--json")
    expected = BuildConfig(**{name: 33})
    assert read_engine_config(tmp_path / "engine").build == expected
    assert data.json == asdict(expected) | {"exclude": [], "compute_capabilities": []}
    assert all(f"{key} {value}" in text.out for key, value in asdict(expected).items() if value)
    assert "weights" not in text.out
    assert str(tmp_path / "engine") in text.out
    for done in (text, data):
        assert done.status == 0
        assert done.err.splitlines()[-1].startswith("build: ")


def test_build_takes_an_expert_capacity(command: Run, folders: Folders, tmp_path: Path) -> None:
    """The engine stores it and shows it, and its pools and weights are those of an engine without."""
    words = ["build", folders.checkpoint, "-o", tmp_path / "engine", "--moe-capacity-factor", 1.25]
    for overflow, more in (("drop", []), ("next_best", ["--moe-overflow", "next_best"])):
        text = command(*words, *more)
        config = read_engine_config(tmp_path / "engine")
        assert config.build == BuildConfig(moe_capacity_factor=1.25, moe_overflow=overflow)
        assert f"moe_capacity_factor 1.25, moe_overflow {overflow}" in text.out
        assert f"moe_capacity_factor 1.25, moe_overflow {overflow}" in command("inspect", tmp_path / "engine").out
        assert config.memory() == replace(config, build=BuildConfig()).memory()
        assert config.program().weights == replace(config, build=BuildConfig()).program().weights
    assert "warning: the engine's experts" in command("verify", folders.model, tmp_path / "engine").err
    assert "warning" not in command("verify", folders.model, folders.engine).err


def test_verify_says_what_an_engine_rounds(command: Run, folders: Folders, tmp_path: Path) -> None:
    """Not where the checkpoint is stored as it is, nor where somebody has said how far the engine may depart."""
    words = ["verify", folders.model, tmp_path / "engine"]
    for options, said in (
        (["--weights", "float32"], None),
        (["--weights", "int8", "--state-dtype", "bfloat16"], "warning: the engine keeps weights in int8, states in bf"),
    ):
        command("build", folders.checkpoint, "-o", tmp_path / "engine", *options)
        assert [line[: len(said or "")] for line in command(*words).err.splitlines() if "warning" in line] == (
            [] if said is None else [said]
        )
    assert "warning" not in command(*words, "--threshold", 10).err


def test_a_build_that_is_terminated_cleans_up(
    command: Run, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Ctrl-C; afterwards the signal means what it meant."""

    def terminated(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hybridtrt.build.build.write_packed", terminated)
    done = command("build", folders.checkpoint, "-o", tmp_path / "engine")
    assert done.status == 130
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_default_length_is_the_models_where_that_is_shorter(command: Run, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_checkpoint(FAMILY), tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 70}))
    command("convert", model, "-o", tmp_path / "checkpoint")
    assert command("build", tmp_path / "checkpoint", "-o", tmp_path / "engine", "--json").json["max_seq_len"] == 70
    too_long = command("build", tmp_path / "checkpoint", "-o", tmp_path / "engine", "--max-seq-len", 71)
    assert (too_long.status, too_long.err) == (1, "error: max_seq_len=71 exceeds the model's 70 positions\n")


def test_inspect_shows_the_same_model_at_every_stage(command: Run, folders: Folders) -> None:
    """A model folder, a checkpoint and an engine: one table; limits, memory and the cost of a token for the engine."""
    summary = describe(load_checkpoint(folders.checkpoint).config)
    for kind in ("model", "checkpoint", "engine"):
        path = getattr(folders, kind)
        text, data = command("inspect", path), command("inspect", path, "--json")
        assert (text.status, data.status, text.err, data.err) == (0, 0, "", "")
        assert text.out.startswith(render(summary) + "\n")
        described = {key: value for key, value in data.json.items() if key not in ("build_config", "memory", "decode")}
        assert described == {"kind": kind, **summary.to_dict()}
        if kind != "engine":
            assert described == data.json
            continue
        plan = read_engine_config(path).memory()
        assert data.json["build_config"] == asdict(BuildConfig(**LIMITS)) | {"exclude": [], "compute_capabilities": []}
        assert data.json["memory"] == {**asdict(plan), "total_bytes": plan.total_bytes}
        assert f"pages {plan.page_bytes:,}, states {plan.state_bytes:,}" in text.out
        assert f"{plan.total_bytes:,} bytes: weights {plan.weight_bytes:,}" in text.out
        assert all(f"{name} {value}" in text.out for name, value in LIMITS.items())


def test_cost_of_a_decoded_token(command: Run, folders: Folders) -> None:
    """At batch 1 a token reads every weight but the experts it does not choose and the other rows of the embedding."""
    engine = read_engine_config(folders.engine)
    decode = command("inspect", folders.engine, "--json").json["decode"]
    read = {name: 4 * math.prod(spec.shape) for name, spec in engine.model.weight_table().items()}
    read["embedding.weight"] //= TEXT_VOCAB
    read |= {name: size // 2 for name, size in read.items() if ".experts." in name}  # 2 of 4 are chosen
    states = 2 * describe(engine.model).state_bytes
    assert sum(read.values()) + states < decode["bytes_per_token"] < 1.5 * (sum(read.values()) + states)
    assert 2 * sum(read.values()) / 4 < decode["flops_per_token"] < 3 * sum(read.values()) / 4


def test_prompts_of_both_kinds_in_the_order_asked(command: Run, folders: Folders) -> None:
    """Text and tokens mixed, more than run at once: each gets transformers' greedy tokens, in its place."""
    tokenizer, model = load_tokenizer(folders.engine), tiny_model(FAMILY, TEXT_VOCAB)
    assert tokenizer is not None
    texts = ("def f(x):", "import os\n")
    asked = ["--input-ids", "5,6,7", "--prompt", texts[0], "--input-ids", 9, "--input-ids", "8,8", "--prompt", texts[1]]
    prompts = [(5, 6, 7), tokenizer.encode(texts[0]), (9,), (8, 8), tokenizer.encode(texts[1])]
    done = command("generate", folders.engine, *asked, "--max-tokens", 20, "--ignore-eos", "--json")
    assert (done.status, done.err) == (0, "")
    assert set(done.json) == {"outputs"}
    for prompt, output in zip(prompts, done.json["outputs"], strict=True):
        assert set(output) == {"input_ids", "output_ids", "text", "finish_reason"}
        assert output["input_ids"] == list(prompt)
        assert len(output["output_ids"]) == 20
        expected = oracle_logits(model, [*prompt, *output["output_ids"]])
        assert agreeing_tokens(expected[len(prompt) - 1 : -1], output["output_ids"]) == 20
        assert output["text"] == tokenizer.decode(output["output_ids"])
        assert output["finish_reason"] == "length"


def test_generated_text_without_json(command: Run, folders: Folders) -> None:
    """One prompt: its text alone. More: each with its number. Without a tokenizer: token ids."""
    words = ["--input-ids", "5,6,7", "--ignore-eos"]
    first = command("generate", folders.engine, *words, "--json").json["outputs"][0]
    second = command("generate", folders.engine, "--input-ids", 9, "--ignore-eos", "--json").json["outputs"][0]
    assert len(first["output_ids"]) == len(second["output_ids"]) == 32
    assert first["text"] != second["text"]
    assert command("generate", folders.engine, *words) == Done(0, first["text"] + "\n", "")
    both = command("generate", folders.engine, *words, "--input-ids", 9)
    assert both == Done(0, f"[0] {first['text']}\n[1] {second['text']}\n", "")
    for more, expected in (([], [first]), (["--input-ids", 9], [first, second])):
        done = command("generate", folders.bare_engine, *words, *more)
        assert done.out.splitlines() == [",".join(map(str, output["output_ids"])) for output in expected]
    bare = command("generate", folders.bare_engine, *words, "--json").json["outputs"][0]
    assert bare == first | {"text": None}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--max-tokens", 7], "max_tokens", 7),
        (["--temperature", 0.5], "temperature", 0.5),
        (["--top-k", 3], "top_k", 3),
        (["--top-p", 0.25], "top_p", 0.25),
        (["--seed", 11], "seed", 11),
        (["--min-tokens", 3], "min_tokens", 3),
        (["--min-p", 0.125], "min_p", 0.125),
        (["--repetition-penalty", 1.5], "repetition_penalty", 1.5),
        (["--presence-penalty", -0.5], "presence_penalty", -0.5),
        (["--frequency-penalty", 0.5], "frequency_penalty", 0.5),
        (["--logit-bias", "5:-1.5", "--logit-bias", "7:2"], "logit_bias", ((5, -1.5), (7, 2.0))),
        (["--bad-word", "a b", "--bad-word", "c"], "bad_words", ("a b", "c")),
        (["--n", 3], "n", 3),
        (["--log-probs"], "return_log_probs", True),
        (["--top-log-probs", 2], "top_log_probs", 2),
        (["--prompt-log-probs", 0], "prompt_log_probs", 0),
        (["--stop-word", "a b", "--stop-word", "c"], "stop_words", ("a b", "c")),
        (["--stop-token-id", 4, "--stop-token-id", 5], "stop_token_ids", (4, 5)),
        (["--ignore-eos"], "ignore_eos", True),
    ],
)
def test_each_sampling_option_arrives(
    command: Run, monkeypatch: pytest.MonkeyPatch, words: list[Any], field: str, value: Any
) -> None:
    calls = []
    monkeypatch.setattr(hybridtrt.runtime.generate, "generate", lambda *args: calls.append(args) or [])
    command("generate", "engine", "--prompt", "a", *words, "--json")
    ((engine, prompts, params, options, on_output),) = calls
    assert (engine, prompts, on_output) == (Path("engine"), ["a"], None)
    assert asdict(params) == asdict(SamplingParams(max_tokens=32)) | {field: value}
    assert options == RunOptions()


@pytest.mark.parametrize(
    ("option", "guide_type", "guide"),
    [
        ("--json-schema", "json_schema", '{"type": "object"}'),
        ("--regex", "regex", "[a-c]+"),
        ("--grammar", "ebnf_grammar", 'root ::= "a"\n'),
    ],
)
def test_guides_as_text_and_in_files(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, guide_type: str, guide: str
) -> None:
    """A schema or a grammar may be a file; an expression is always text."""
    calls = []
    monkeypatch.setattr(hybridtrt.runtime.generate, "generate", lambda *args: calls.append(args[2]) or [])
    (tmp_path / "guide").write_text(guide)
    for given in (guide, tmp_path / "guide"):
        command("generate", "engine", "--prompt", "a", option, given)
    text, file = calls
    assert (text.guide_type, text.guide) == (guide_type, guide)
    assert (file.guide_type, file.guide) == (guide_type, str(tmp_path / "guide") if option == "--regex" else guide)


RUN_OPTIONS = (
    (["--threads", 2], "threads", 2),
    (["--kv-cache-tokens", 500], "kv_cache_tokens", 500),
    (["--max-batch-size", 2], "max_batch_size", 2),
    (["--max-num-tokens", 20], "max_num_tokens", 20),
    (["--policy", "max_utilization"], "policy", "max_utilization"),
    (["--swap-bytes", "2MiB"], "swap_bytes", 2 << 20),
    (["--no-prefix-cache"], "enable_block_reuse", False),
    (["--prefix-cache"], "enable_block_reuse", True),
    (["--prefix-cache-bytes", "3MB"], "prefix_cache_bytes", 3_000_000),
    (["--max-draft-tokens", 4], "max_draft_tokens", 4),
)


@pytest.mark.parametrize(("words", "field", "value"), RUN_OPTIONS)
def test_each_option_of_a_run_arrives(
    command: Run, monkeypatch: pytest.MonkeyPatch, words: list[Any], field: str, value: Any
) -> None:
    """In `generate` and in `serve`; it changes what is computed only where it must."""
    calls: list[RunOptions] = []
    monkeypatch.setattr(hybridtrt.runtime.generate, "generate", lambda *args: calls.append(args[3]) or [])
    monkeypatch.setattr(hybridtrt.model_repo.supervisor, "run_server", lambda options, _: calls.append(options.run))
    command("generate", "engine", "--prompt", "a", *words)
    assert command("serve", ".", *words).status == 0
    assert calls == [RunOptions(**{field: value})] * 2


def test_options_of_a_run_do_not_change_the_tokens(command: Run, folders: Folders) -> None:
    prompts = [word for start in range(5) for word in ("--input-ids", ",".join(str(start + i) for i in range(40)))]
    words = ["generate", folders.engine, *prompts, "--max-tokens", 6, "--ignore-eos", "--json"]
    expected = command(*words)
    assert expected.status == 0
    for option, _, _ in RUN_OPTIONS:
        assert command(*words, *option) == expected, option


def test_several_answers_with_log_probabilities(command: Run, folders: Folders) -> None:
    """Each answer has its own tokens; the first also the log-probabilities of all prompt tokens but one."""
    words = ["generate", folders.engine, "--input-ids", "5,6,7", "--max-tokens", 6, "--n", 2, "--temperature", 1]
    words += ["--seed", 3, "--ignore-eos"]
    asked = command(*words, "--log-probs", "--top-log-probs", 2, "--prompt-log-probs", 1, "--json").json["outputs"]
    plain = command(*words, "--json").json["outputs"]
    assert [answer["output_ids"] for answer in asked] == [answer["output_ids"] for answer in plain]
    assert asked[0]["output_ids"] != asked[1]["output_ids"]
    for answer in asked:
        assert len(answer["log_probs"]) == len(answer["top_log_probs"]) == len(answer["output_ids"])
        for token, value, top in zip(answer["output_ids"], answer["log_probs"], answer["top_log_probs"], strict=True):
            assert len(top) == 2
            assert value <= top[0][1]
            assert dict(top).get(token, value) == value
    assert [len(answer.get("prompt_log_probs", ())) for answer in asked] == [2, 0]
    assert set(plain[0]) == {"input_ids", "output_ids", "text", "finish_reason"}
    shown = command(*words).out
    assert [line[:3] for line in shown.splitlines() if re.match(r"\[\d\]", line)] == ["[0]", "[1]"]


def test_a_prompt_that_fails_leaves_the_others_alone(command: Run, folders: Folders, tmp_path: Path) -> None:
    """A token whose embedding is NaN: one line on standard error, status 1, and the other prompt's tokens."""
    engine = shutil.copytree(folders.engine, tmp_path / "engine")
    weights = load_file(engine / "rank0.engine")
    vocab = read_engine_config(engine).model.vocab_size
    weights["float32:embedding.weight"].view(torch.float32).reshape(vocab, -1)[5] = float("nan")
    save_file(weights, engine / "rank0.engine")
    words = ["generate", engine, "--input-ids", "8,5,8", "--input-ids", "9,7", "--max-tokens", 3]
    good = command("generate", folders.engine, "--input-ids", "9,7", "--max-tokens", 3, "--json").json["outputs"][0]
    message = "FloatingPointError: the logits of this request are not finite, or no token is allowed"
    for done in (command(*words), command(*words, "--json")):
        assert (done.status, done.err) == (1, f"error: prompt 0: {message}\n")
    failed = {"input_ids": [8, 5, 8], "output_ids": [], "text": "", "finish_reason": "error", "error": message}
    assert done.json == {"outputs": [failed, good]}
    assert command(*words).out == f"[1] {good['text']}\n"


def test_verify_past_the_threshold(command: Run, folders: Folders) -> None:
    """Status 0 within the threshold and 1 past it; the same report as text, and progress on standard error."""
    words = ["verify", folders.model, folders.engine]
    passed = command(*words, "--json")
    report = passed.json
    assert (passed.status, report["passed"]) == (0, True)
    assert 0 < report["logit_error"] <= report["threshold"] == THRESHOLDS["float32"]
    assert report["logit_error"] == max(prompt["logit_error"] for prompt in report["prompts"])
    lengths = [length for length in (1, 2, 7, 64, 65, 200) if length < LIMITS["max_seq_len"]]
    assert [prompt["prompt_tokens"] for prompt in report["prompts"]] == lengths
    for key in ("greedy_tokens", "greedy_agree"):
        assert report[key] == sum(prompt[key] for prompt in report["prompts"]) == 32 * len(lengths)

    failed, text = command(*words, "--threshold", 1e-12, "--json"), command(*words, "--threshold", 1e-12)
    assert failed.status == text.status == 1
    assert (failed.json["passed"], failed.json["threshold"]) == (False, 1e-12)
    assert re.fullmatch(r"FAILED: \d\.\d\de-\d\d against 1e-12", text.out.splitlines()[-1])
    assert all(line.startswith("verify: ") for done in (passed, failed, text) for line in done.err.splitlines())


@pytest.mark.parametrize(
    ("stored", "asked", "expected"), [("bfloat16", None, "float32"), ("float32", "bfloat16", "bfloat16")]
)
def test_threshold_follows_what_conversion_rounded(
    command: Run, tmp_path: Path, stored: str, asked: str | None, expected: str
) -> None:
    """Weights as the model stores them are exact; those of a narrower dtype are not."""
    save(random_model(FAMILY, TINY[FAMILY]).to(getattr(torch, stored)), tmp_path / "model")
    command("convert", tmp_path / "model", "-o", tmp_path / "checkpoint", *(["--dtype", asked] if asked else []))
    command("build", tmp_path / "checkpoint", "-o", tmp_path / "engine", "--max-seq-len", 10)
    done = command("verify", tmp_path / "model", tmp_path / "engine", "--json")
    assert (done.status, done.json["passed"], done.json["threshold"]) == (0, True, THRESHOLDS[expected])


def test_verify_in_what_room_there_is(command: Run, folders: Folders, tmp_path: Path) -> None:
    """Prompts leave room for one token at least, and get no more tokens than fit."""
    command("build", folders.checkpoint, "-o", tmp_path / "engine", "--max-seq-len", 65)
    report = command("verify", folders.model, tmp_path / "engine", "--json").json
    lengths = [(prompt["prompt_tokens"], prompt["greedy_tokens"]) for prompt in report["prompts"]]
    assert lengths == [(1, 32), (2, 32), (7, 32), (64, 1)]


def test_verify_against_another_model(command: Run, folders: Folders, tmp_path: Path) -> None:
    other = save(random_model(FAMILY, TINY[FAMILY] | {"vocab_size": TEXT_VOCAB}, seed=1), tmp_path / "other")
    done = command("verify", other, folders.engine, "--json")
    assert (done.status, done.json["passed"]) == (1, False)
    assert done.json["logit_error"] > 1
    assert done.json["greedy_agree"] < done.json["greedy_tokens"] / 2


ACHIEVED = {"gb_per_s", "gflop_per_s", "memory_share", "compute_share"}


def test_bench(command: Run, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates by a clock that ticks once a step: 3 prompts of 40 tokens take two steps of 64, then 4 steps decode."""
    steps = 0
    step = Engine.step

    def counted(engine: Engine) -> Any:
        nonlocal steps
        steps += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(hybridtrt.runtime.bench, "time", SimpleNamespace(perf_counter=lambda: float(steps)))
    words = ["bench", folders.engine, "--batch", "1,3", "--prompt", 40, "--new", 5]
    done = command(*words, "--json")
    assert (done.status, done.err) == (0, "")
    assert set(done.json) == {"results", "limits"}
    one, three = done.json["results"]
    memory = [one.pop("peak_rss_mb"), three.pop("peak_rss_mb")]
    assert 0 < one.pop("between_ms") < 1000  # the executor has a clock of its own
    achieved = [one.pop("prefill"), one.pop("decode")]
    rates = {"prefill_tokens_per_s": 40.0, "decode_tokens_per_s": 1.0, "ttft_ms": 1000.0, "tpot_ms": 1000.0}
    assert one == {"batch": 1, "prompt": 40, "new": 5, "profile": [], **rates}
    assert all(set(found) == ACHIEVED for found in achieved)
    assert (three["ttft_ms"], three["tpot_ms"]) == (2000.0, 1000.0)
    assert (three["batch"], three["prefill_tokens_per_s"]) == (3, 60.0)
    assert three["decode_tokens_per_s"] in (11 / 4, 12 / 4)  # the first prompt may decode while the last is prefilled
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    assert all(most / 4 < value <= most + 1 for value in memory)
    text = command(*words)
    lines = [line for line in text.out.splitlines() if line.startswith("batch")]
    assert [line.split(",")[0] for line in lines] == ["batch 1", "batch 3"]
    assert "prefill 40.0 tokens/s, decode 1.0 tokens/s, TTFT 1000.0 ms, TPOT 1000.00 ms" in lines[0]


def test_bench_shows_where_the_time_goes(command: Run, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", folders.engine, "--prompt", 20, "--new", 4, "--profile"]
    done = command(*words, "--json")
    (result,) = done.json["results"]
    assert [phase["phase"] for phase in result["profile"]] == ["prefill", "decode"]
    assert result["profile"][1]["steps"] == 3
    assert done.json["limits"]["read_gb_per_s"] > 0
    lines = command(*words).out.splitlines()
    assert lines[0].startswith("limits of ")
    assert lines.count("  by layer kind") == lines.count("  by operator") == 2

    def on_torch(engine: Path, options: RuntimeOptions) -> Runner:
        return load_runner(engine, replace(options, walker="torch"))

    monkeypatch.setattr(hybridtrt.runtime.bench, "load_runner", on_torch)
    plain = command(*words)
    assert (plain.status, "by operator" in plain.out) == (0, False)
    assert plain.err == "no profile: this engine runs on torch, whose kernels are not timed one by one\n"


def test_bench_counts_every_token(
    command: Run, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    @contextmanager
    def counting(label: str, total: int, unit: str) -> Any:
        ticks: list[None] = []
        yield lambda: ticks.append(None)
        seen.extend((total, len(ticks)))

    monkeypatch.setattr(hybridtrt.progress, "count_progress", counting)
    engine = shutil.copytree(folders.engine, tmp_path / "engine")
    config = json.loads((engine / "config.json").read_text())
    config["pretrained_config"]["eos_token_ids"] = list(range(TEXT_VOCAB))  # any token would end a request
    (engine / "config.json").write_text(json.dumps(config))
    assert command("bench", engine, "--batch", "1,3", "--prompt", 4, "--new", 3).status == 0
    assert seen == [12, 12]


@pytest.mark.parametrize("words", [("generate", "--input-ids", 1), ("bench", "--prompt", 1, "--new", 2)])
def test_threads(command: Run, folders: Folders, words: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Watched(CpuRunner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            asked.append(self._options[0])

    monkeypatch.setattr(load_module, "CpuRunner", Watched)
    for count in (2, 1):
        assert command(words[0], folders.engine, *words[1:], "--threads", count).status == 0
    assert asked == [2, 1]


def test_serve_passes_its_options_on(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(hybridtrt.model_repo.supervisor, "run_server", lambda options, _: calls.append(options))
    assert command("serve", ".").status == 0
    ports = ["--http-port", 1, "--grpc-port", 2, "--metrics-port", 3]
    command("serve", ".", *ports, "--state-dir", "state", "--drain-seconds", 1.5)
    assert calls == [
        ServeOptions(Path()),
        ServeOptions(Path(), 1, 2, 3, state_dir=Path("state"), drain_seconds=1.5),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convert nowhere -o out", "nowhere: no such folder"),
        ("convert pickled -o out", "pickle files are never loaded"),
        ("convert empty -o out", "empty/config.json: cannot be read"),
        ("convert model -o model", "holds the model itself"),
        ("convert model -o full", "exists and was not written by hybridtrt"),
        ("convert model -o full/file/out", "Not a directory"),
        ("convert model", "nowhere to write to: give --output FOLDER"),
        ("build nowhere -o out", "nowhere/config.json: cannot be read"),
        ("build model -o out", "is not a checkpoint of hybridtrt"),
        ("build checkpoint -o checkpoint", "holds the checkpoint itself"),
        ("build checkpoint -o full", "exists and was not written by hybridtrt"),
        ("build checkpoint -o out --target gpu", "target 'gpu' is not known; known: cpu, tensorrt, tensorrt-rtx"),
        ("build checkpoint -o out --max-batch-size 0", "max_batch_size=0 is not in 1..4096"),
        ("build checkpoint -o out --max-num-tokens -1", "max_num_tokens=-1 is not in 1.."),
        ("build checkpoint -o out --tokens-per-block 5000", "tokens_per_block=5000 is not in 1..4096"),
        ("build checkpoint -o out --max-num-tokens 7", "max_num_tokens=7 is less than max_batch_size=8"),
        ("inspect nowhere", "nowhere: no such folder"),
        ("inspect empty", "empty/config.json: cannot be read"),
        ("generate engine", "give --prompt TEXT or --input-ids 1,2,3"),
        ("generate nowhere --input-ids 1", "nowhere is not an engine"),
        ("generate model --input-ids 1", "is not an engine's"),
        ("generate bare_engine --prompt x", "has no tokenizer: give token ids instead of text"),
        ("generate bare_engine --input-ids 1 --stop-word x", "need a tokenizer, and the engine has none"),
        ("generate engine --prompt=", "the prompt is empty"),
        ("generate engine --prompt \udcff", "text is not valid UTF-8"),
        ("generate engine --input-ids 1 --input-ids 384", "token id 384 is not in 0..383"),
        ("generate engine --input-ids=-1", "token id -1 is not in 0..383"),
        ("generate engine --input-ids 1 --max-tokens 128", "exceed max_seq_len=128"),
        ("generate engine --input-ids 1 --max-tokens 0", "max_tokens=0 must be an integer of at least 1"),
        ("generate engine --input-ids 1 --temperature nan", "temperature=nan must be"),
        ("generate engine --input-ids 1 --top-k=-1", "top_k=-1 must be"),
        ("generate engine --input-ids 1 --top-p 1.5", "top_p=1.5 must be"),
        ("generate engine --input-ids 1 --seed=-1", "seed=-1 must be"),
        ("generate engine --input-ids 1 --min-p 2", "min_p=2.0 must be"),
        ("generate engine --input-ids 1 --min-tokens=-1", "min_tokens=-1 must be"),
        ("generate engine --input-ids 1 --repetition-penalty 0", "repetition_penalty=0.0 must be"),
        ("generate engine --input-ids 1 --presence-penalty nan", "presence_penalty=nan must be"),
        ("generate engine --input-ids 1 --logit-bias 384:1", "384"),
        ("generate engine --input-ids 1 --n 0", "n=0 must be"),
        ("generate engine --input-ids 1 --top-log-probs=-1", "top_log_probs=-1 must be"),
        ("generate engine --input-ids 1 --json-schema nowhere", "json_schema='nowhere' is no file"),
        ("generate engine --input-ids 1 --regex (", "regex"),
        ("generate engine --input-ids 1 --grammar engine", "grammar='"),
        ("generate bare_engine --input-ids 1 --bad-word x", "need a tokenizer, and the engine has none"),
        ("generate bare_engine --input-ids 1 --regex x", "tokenizer"),
        ("generate engine --input-ids 1 --threads 0", "threads=0 is not positive"),
        ("generate engine --input-ids 1 --kv-cache-tokens 0", "kv_cache_tokens=0 is not positive"),
        ("generate engine --input-ids 1 --max-draft-tokens=-1", "max_draft_tokens=-1 is negative"),
        ("generate engine --input-ids 1 --max-batch-size 4", "max_batch_size=4 exceeds max_batch_size=3 of the engine"),
        ("generate engine --input-ids 1 --max-num-tokens 0", "max_num_tokens=0"),
        ("generate engine --input-ids 1 --policy best", "policy='best' is not one of guaranteed_no_evict, max_util"),
        ("verify nowhere engine", "nowhere is not a model folder: there is no config.json in it"),
        ("verify empty engine", "empty is not a model folder"),
        ("verify model nowhere", "nowhere is not an engine"),
        ("verify foreign engine", "has 96 tokens"),
        ("verify full engine", "transformers cannot load it: "),
        ("verify pickled engine", "transformers cannot load it: "),
        ("bench nowhere", "nowhere is not an engine"),
        ("bench engine --batch 1,4", "batch 4 is not in 1..3"),
        ("bench engine --batch 0", "batch 0 is not in 1..3"),
        ("bench engine --prompt 0", "prompt 0 and new 64 need"),
        ("bench engine --prompt 1 --new 1", "prompt 1 and new 1 need"),
        ("bench engine --prompt 65 --new 64", "at most 128 tokens together"),
        ("bench engine --threads 0", "threads=0 is not positive"),
        ("serve nowhere", "nowhere"),
    ],
)
def test_bad_input_is_one_line(command: Run, folders: Folders, tmp_path: Path, words: str, message: str) -> None:
    """Status 1, nothing on standard output, one line on standard error, and nothing written."""
    paths = {name: getattr(folders, name) for name in ("model", "checkpoint", "engine", "bare_engine")}
    paths |= {
        "foreign": tiny_checkpoint(FAMILY),
        **{name: tmp_path / name for name in ("empty", "full", "out", "pickled")},
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "full" / "config.json").write_text('{"model_type": "nothing"}')
    shutil.copytree(folders.model, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(folders.model / "model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    before = sorted(tmp_path.rglob("*"))
    parts = [word.split("/", 1) for word in words.split(" ")]
    done = command(*("/".join([str(paths.get(first, first)), *rest]) for first, *rest in parts))
    *progress, line = done.err.splitlines()
    assert (done.status, done.out) == (1, "")
    assert line.startswith("error: ")
    assert message in line
    assert all(stage.startswith("verify: ") for stage in progress)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        "",
        "translate x",
        "convert",
        "convert model -o out --dtype int8",
        "generate engine --input-ids 1,x",
        "generate engine --input-ids=",
        "generate engine --input-ids 1 --max-tokens many",
        "generate engine --input-ids 1 --logit-bias 5",
        "generate engine --input-ids 1 --logit-bias 5:x",
        "generate engine --input-ids 1 --swap-bytes 5XB",
        "generate engine --input-ids 1 --regex a --grammar b",
        "bench engine --batch 1,,2",
        "serve engine --json",
    ],
)
def test_bad_usage_is_status_2(command: Run, words: str) -> None:
    done = command(*words.split())
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("usage: hybridtrt")
    assert ": error: " in done.err.splitlines()[-1]


@pytest.mark.parametrize("name", OPTIONS)
def test_help_names_every_option(command: Run, name: str) -> None:
    done = command(name, "--help")
    assert (done.status, done.err) == (0, "")
    assert all(option in done.out for option in OPTIONS[name])
    assert name in command("--help").out


def test_help_of_build_says_what_its_limits_are_by_default(command: Run) -> None:
    said = re.findall(r"\((\d+)\b", command("build", "--help").out)
    defaults = BuildConfig()
    assert [int(number) for number in said] == [getattr(defaults, name) for name in LIMITS]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\n  lines"), 1, "error: two lines"),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "error: [Errno 2] No such file or directory: 'x'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_how_a_command_ends(
    command: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, line: str
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(hybridtrt.build.inspect, "inspect", fail)
    assert command("inspect", "x") == Done(status, "", line + "\n")
