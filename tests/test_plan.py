"""`plan` against figures computed by hand for the dimensions of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SPECIAL_IDS, TINY, model_type
from hypothesis import given, settings
from hypothesis import strategies as st
from published import PARAMETERS, PUBLISHED

from hybridtrt.cli import main
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.describe import describe
from hybridtrt.converters.families import families, family
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.memory import weight_bytes
from hybridtrt.converters.parallel import Split, splits, stages
from hybridtrt.converters.plan import RUNTIME_BYTES, PlanOptions, RankPlan, plan

KNOWN = [name for name, values in PUBLISHED.items() if values["model_type"] in families()]
VARIANTS = sorted(name for name in TINY if model_type(name) in families())
F32, BF16 = 4, 2


def config(name: str) -> ModelConfig:
    return family(PUBLISHED[name]["model_type"]).config(HFConfig(PUBLISHED[name]))


def rank(name: str, split: Split, **options: Any) -> RankPlan:
    planned = plan(config(name), PlanOptions(gpus=split.tp * split.pp, dtype="bfloat16", **options))
    (found,) = (one for one in planned.ranks if one.split == split)
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert describe(config(name)).parameters == PARAMETERS[name]
    assert plan(config(name), PlanOptions(gpus=1)).parameters == PARAMETERS[name]


def qwen3_next() -> tuple[Split, int, int, int]:
    """Half of 16 query and 2 key/value heads, of 16 key and 32 value heads, of 512 experts; half of the vocabulary."""
    h = 2048
    attention = BF16 * h * ((8 + 8 + 1 + 1) * 256 + 8 * 256) + F32 * 2 * 256
    delta = BF16 * h * (2 * 1024 + 2 * 2048 + 2 * 16 + 2048) + F32 * (4096 * 4 + 2 * 16 + 128)
    moe = BF16 * 3 * h * (256 * 512 + 256) + F32 * (512 * h + h)
    weights = 12 * attention + 36 * delta + 48 * moe + F32 * h * (2 * 48 + 1) + BF16 * 2 * h * 151936 // 2
    return Split(2, 2, 1), weights, 12 * 2 * 256 * BF16, 36 * F32 * (16 * 128 * 128 + 4096 * 3)


def jamba() -> tuple[Split, int, int, int]:
    """16 of 32 layers, a quarter of heads and channels, 8 of 16 experts, each halved; the stage with the head."""
    h, inner = 4096, 2048
    attention = BF16 * h * (1024 + 2 * 256 + 1024)
    mamba = BF16 * (h * 2 * inner + (256 + 32) * inner + inner * 256 + inner * h)
    mamba += F32 * (inner * 4 + inner + inner + inner * 16 + inner + 256 + 16 + 16)
    mlp, moe = BF16 * 3 * h * 3584, BF16 * 8 * 3 * h * 7168 + F32 * 16 * h
    head = BF16 * h * 65536 // 4 + F32 * h
    weights = 2 * attention + 14 * mamba + 8 * mlp + 8 * moe + F32 * h * 2 * 16 + head
    return Split(4, 2, 2), weights, 2 * 2 * 2 * 128 * BF16, 14 * F32 * inner * (16 + 3)


def mixtral() -> tuple[Split, int, int, int]:
    """16 ranks: two query heads, a copy of one of 8 key/value heads, half of one of 8 experts."""
    h = 4096
    layer = BF16 * h * (256 + 2 * 128 + 256) + BF16 * 3 * h * 7168 + F32 * (8 * h + 2 * h)
    return Split(16, 8, 1), 32 * layer + BF16 * 2 * h * 2000 + F32 * h, 32 * 2 * 128 * BF16, 0


def nemotron() -> tuple[Split, int, int, int]:
    """Half of 64 heads and 8 groups, of 32 query and 2 key/value heads, of every expert's 1856 channels."""
    h = 2688
    mamba = BF16 * h * (2 * 2048 + 2 * 4 * 128 + 32 + 2048) + F32 * (3072 * 4 + 3072 + 3 * 32 + 2048 + h)
    attention = BF16 * h * (2048 + 2 * 128 + 2048) + F32 * h
    moe = BF16 * 2 * h * (128 * 928 + 1856) + F32 * (128 * h + 128 + h)
    weights = 23 * mamba + 6 * attention + 23 * moe + BF16 * 2 * h * 65536 + F32 * h
    return Split(2, 1, 1), weights, 6 * 2 * 128 * BF16, 23 * F32 * (32 * 64 * 128 + 3072 * 3)


def deepseek() -> tuple[Split, int, int, int]:
    """16 of 128 heads, 32 of 256 experts; the compressed cache and the projections to it are copied."""
    h = 7168
    mla = BF16 * (h * 1536 + 1536 * 16 * 192 + h * 576 + 512 * 16 * 256 + 16 * 128 * h) + F32 * (1536 + 512)
    mlp = BF16 * 3 * h * 2304
    moe = BF16 * 3 * h * (32 * 2048 + 256) + F32 * (256 * h + 256)
    weights = 61 * mla + 3 * mlp + 58 * moe + F32 * h * (2 * 61 + 1) + BF16 * 2 * h * 16160
    return Split(8, 8, 1), weights, 61 * 576 * BF16, 0


BY_HAND = dict(zip(PUBLISHED, (qwen3_next, jamba, mixtral, nemotron, deepseek), strict=True))


@pytest.mark.parametrize("name", KNOWN)
def test_weights_and_caches_by_hand(name: str) -> None:
    split, weights, kv_per_token, state = BY_HAND[name]()
    found = rank(name, split, max_seq_len=4000, concurrency=7)
    tokens = (1 + 7 * 125) * 32  # 4000 tokens are 125 pages of 32
    assert found.weights == weights
    assert found.kv == {"full_attention": tokens * kv_per_token}
    states = (1 + 7 + 7) * state  # of sequences and of snapshots
    assert found.states == states
    assert found.total == weights + tokens * kv_per_token + states + found.activations + found.buffers + RUNTIME_BYTES


def test_activations_and_buffers_by_hand() -> None:
    """2048 tokens; the experts are the widest: 10 copies with input, gate and up, output, and the shared expert."""
    found = rank("Qwen3-Next-80B-A3B", Split(2, 2, 2), max_num_tokens=2048, concurrency=3)
    h = 2048
    width = 2 * h + 10 * (2 * h + 2 * 512) + (2 * 256 + h)
    assert found.activations == 2048 * width * BF16 + 3 * 75968 * F32
    assert found.buffers == 2 * (1 + 1 + 10) * 2048 * h * BF16
    assert rank("Qwen3-Next-80B-A3B", Split(1, 1, 1)).buffers == 0


def test_what_fits_and_what_is_not_possible() -> None:
    eight = plan(config("Qwen3-Next-80B-A3B"), PlanOptions(gpus=8, dtype="bfloat16"))
    sizes = [(one.split.tp, one.split.ep, one.split.pp) for one in eight.ranks]
    assert sizes == [
        (1, 1, 8), (2, 1, 4), (2, 2, 4), (4, 1, 2), (4, 2, 2), (4, 4, 2), (8, 1, 1), (8, 2, 1), (8, 4, 1), (8, 8, 1),
    ]  # fmt: skip
    assert all(one.fits for one in eight.ranks)
    assert eight.impossible == {}
    (one,) = plan(config("Qwen3-Next-80B-A3B"), PlanOptions(gpus=1, dtype="bfloat16")).ranks
    assert (one.fits, one.sequences) == (False, 0)
    five = plan(config("Qwen3-Next-80B-A3B"), PlanOptions(gpus=5))
    assert five.ranks == []
    assert five.impossible == {
        "TP 1, EP 1, PP 5": "48 layers do not divide into 5 stages",
        "TP 5, EP 1, PP 1": "gated_delta.num_k_heads=16 does not divide by 5",
        "TP 5, EP 5, PP 1": "gated_delta.num_k_heads=16 does not divide by 5",
    }


@pytest.mark.parametrize("name", KNOWN)
def test_the_number_of_sequences_is_the_largest_that_fits(name: str) -> None:
    options = PlanOptions(gpus=16, dtype="bfloat16", max_seq_len=32768)
    for found in plan(config(name), options).ranks:
        fixed = found.activations  # they grow with the concurrency too, by a row of logits
        for count, fits in ((found.sequences, True), (found.sequences + 1, False)):
            if count:
                again = rank(name, found.split, max_seq_len=32768, concurrency=count)
                assert (again.total - again.activations + fixed <= 80e9) == fits


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family(variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one GPU the weights are those of the checkpoint; on two no rank has more than the whole."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type(variant), **SPECIAL_IDS, **TINY[variant]})
    )
    arguments = ["plan", str(tmp_path), "--max-seq-len", "64", "--json"]
    assert main([*arguments, "--gpus", "1"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert one["ranks"][0]["weights"] == json.loads(capsys.readouterr().out)["weight_bytes"]
    assert main([*arguments, "--gpus", "2"]) == 0
    two = json.loads(capsys.readouterr().out)
    assert two["ranks"] or two["impossible"]
    assert all(found["weights"] <= one["ranks"][0]["weights"] for found in two["ranks"])


@given(gpus=st.integers(1, 96))
@settings(max_examples=40, deadline=None)
def test_splits_use_every_gpu_and_keep_all_weights(gpus: int) -> None:
    whole = config("Jamba-1.5-Mini")
    for split in splits(gpus, has_experts=True):
        assert split.tp * split.pp == gpus
        assert split.tp % split.ep == 0
        try:
            parts = stages(whole, split)
        except ValueError as error:
            assert "divide" in str(error)  # noqa: PT017
            continue
        assert sum(len(part.layers) for part in parts) == len(whole.layers)
        assert len(parts) == split.pp
        if split.pp == 1:
            assert weight_bytes(parts[0]) * split.tp >= weight_bytes(whole) * 0.99


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Jamba-1.5-Mini"]))
    assert main(["plan", str(tmp_path), "--gpus", "6", "--max-seq-len", "65536", "--concurrency", "8"]) == 0
    text = capsys.readouterr().out
    assert "jamba: 51,570,323,328 parameters, bfloat16" in text
    assert "GPUs: 6 of 80 GB; 8 sequences of 65536 tokens" in text
    assert "not possible: TP 1, EP 1, PP 6: 32 layers do not divide into 6 stages" in text
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 160
    assert main(["plan", str(tmp_path), "--gpus", "1", "--gpu-memory", "24"]) == 0
    assert "nothing fits" in capsys.readouterr().out


def test_dtypes_of_caches() -> None:
    """KV as the matrices or by its own dtype, states in float32 or by theirs."""
    plain = rank("Jamba-1.5-Mini", Split(1, 1, 1))
    for options, kv, states in (
        ({"state_dtype": "bfloat16"}, 1, 0.5),
        ({"kv_cache_dtype": "float32"}, 2, 1),
        ({"kv_cache_dtype": "bfloat16", "state_dtype": "float32"}, 1, 1),
    ):
        found = rank("Jamba-1.5-Mini", Split(1, 1, 1), **options)
        assert found.kv == {name: kv * size for name, size in plain.kv.items()}
        assert found.states == states * plain.states
        assert found.total - plain.total == (kv - 1) * sum(plain.kv.values()) + (states - 1) * plain.states


def test_a_window_takes_its_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """22 of 26 layers see 1024 tokens, however long the sequences: 1023 before a step of 2048 touch 97 pages."""
    values = {"model_type": "gemma3_text", "sliding_window": 1024, "num_key_value_heads": 4, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(values))
    arguments = ["plan", str(tmp_path), "--gpus", "1", "--max-num-tokens", "2048", "--dtype", "bfloat16"]
    per_token = 2 * 4 * 256 * BF16
    for length, full in ((8192, 256), (65536, 2048)):
        assert main([*arguments, "--max-seq-len", str(length), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["pages"] == {"window_1024": 97, "full_attention": full}
        assert data["ranks"][0]["kv"] == {
            "window_1024": (1 + 16 * 97) * 32 * 22 * per_token,
            "full_attention": (1 + 16 * full) * 32 * 4 * per_token,
        }
    assert main([*arguments, "--state-dtype", "bfloat16", "--kv-cache-dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert "KV window_1024: 97 pages of 32 tokens a sequence at most" in text
    assert "KV is kept in float32, states in bfloat16" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "gpus=0 is not in 1..4096"),
        (["--gpus", "2", "--gpu-memory", "-1"], "gpu_memory=-1.0 is not a positive number"),
        (["--gpus", "2", "--gpu-memory", "nan"], "gpu_memory=nan is not a positive number"),
        (["--gpus", "2", "--concurrency", "0"], "concurrency=0 is not in"),
        (["--gpus", "2", "--max-num-tokens", "0"], "max_num_tokens=0 is not in"),
        (["--gpus", "2", "--max-seq-len", "262145"], "max_seq_len=262145 exceeds the model's 262144 positions"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Jamba-1.5-Mini"]))
    assert main(["plan", str(tmp_path), *options]) == 1
    assert message in capsys.readouterr().err
