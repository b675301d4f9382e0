"""Settings of the first families, one at a time: what a key changes in transformers' logits it changes in ours.

The tests of the config mappings compare a mapping with itself, on a file and on what transformers writes back; a key
that is read by the wrong name, or read and then lost, shows only in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import transformers
from engines import make_engine, oracle_logits, relative_error
from numpy.typing import NDArray

from hybridtrt.build.engine import BuildConfig
from hybridtrt.converters.mixers import Mamba1Config
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import load_runner

LOGIT_ERROR = 1e-4  # of the logits' standard deviation
# Of qwen3_next: with prompt 0 a router is near a tie (1.7e-5), and with 1 or 2 and some values float32 itself is no
# nearer than 1e-4, in one code or the other. test_precision.py looks at many prompts.
PROMPT = np.random.default_rng(3).integers(0, 96, 40).tolist()
LIMITS = BuildConfig(max_batch_size=1, max_num_tokens=64, max_seq_len=64, tokens_per_block=16)
FIXED = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}

# Settings that are not one number, and those that only matter together.
JOINT: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3_next": (
        {"mlp_only_layers": [1]},
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]},
        {"num_hidden_layers": 6, "layer_types": None, "full_attention_interval": 3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5}},
        {"linear_key_head_dim": 4, "linear_num_key_heads": 4},
        {"num_experts": 0},
    ),
    "jamba": (
        {"hidden_size": 40},  # the rank of dt is a sixteenth of it, rounded up
        {"mamba_dt_rank": 3},
        {"attn_layer_period": 2, "attn_layer_offset": 0},
        {"expert_layer_period": 3, "expert_layer_offset": 2},
        {"num_experts": 1},
    ),
    "granitemoehybrid": (
        {"mamba_n_groups": 2},
        {"mamba_expand": 3, "mamba_d_head": "auto"},
        {"time_step_limit": [0.5, 1e4]},
        {"time_step_limit": [0.0, 0.1]},
        {"position_embedding_type": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
        {"num_key_value_heads": None},
        {"num_local_experts": 0},
    ),
}


def ours(model: transformers.PreTrainedModel, folder: Path) -> NDArray[np.float32]:
    return full_logits(load_runner(make_engine(checkpoints.save(model, folder), LIMITS)), PROMPT, chunk=33)


@pytest.mark.parametrize(
    ("family", "setting"),
    [(family, setting) for family, settings in JOINT.items() for setting in settings],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_joint_settings(family: str, setting: dict[str, Any], tmp_path: Path) -> None:
    model = checkpoints.random_model(family, checkpoints.TINY[family] | setting)
    expected = oracle_logits(model, PROMPT)
    assert relative_error(expected, oracle_logits(checkpoints.tiny_model(family), PROMPT)) > 100 * LOGIT_ERROR
    assert relative_error(ours(model, tmp_path / "model"), expected) < LOGIT_ERROR


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Values that may act, the likeliest first."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value + 1, 1)
    elif isinstance(value, float):
        yield from (0.1,) if "eps" in key else (2 * value, 0.5)


def changed(family: str, key: str, value: Any) -> tuple[transformers.PreTrainedModel, NDArray[np.float32]] | None:
    """The model with another value of one key, the first that acts if any does; None if transformers takes none."""
    base = oracle_logits(checkpoints.tiny_model(family), PROMPT)
    found = None
    for other in other_values(key, value):
        try:
            model = checkpoints.random_model(family, checkpoints.TINY[family] | {key: other})
            logits = oracle_logits(model, PROMPT)
        except Exception:  # whatever transformers raises for a value that it does not take
            continue
        if np.isfinite(logits).all():
            found = model, logits
            if relative_error(logits, base) > 100 * LOGIT_ERROR:
                break
    return found


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_every_key_acts_as_in_transformers(family: str, tmp_path: Path) -> None:
    """Each number and flag of `config.json` that transformers takes; most of them change the logits."""
    base = oracle_logits(checkpoints.tiny_model(family), PROMPT)
    values = json.loads((checkpoints.tiny_checkpoint(family) / "config.json").read_text())
    acted = 0
    for key in sorted(set(values) - FIXED):
        found = changed(family, key, values[key])
        if found is not None:
            model, expected = found
            assert relative_error(ours(model, tmp_path / key), expected) < LOGIT_ERROR, key
            acted += relative_error(expected, base) > 100 * LOGIT_ERROR
    assert acted > 15


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_positions_bound_the_length(family: str, tmp_path: Path) -> None:
    values = json.loads((checkpoints.tiny_checkpoint(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 77}))
    assert read_model_config(tmp_path).max_length == 77


@pytest.mark.parametrize("hidden", [16, 33, 40, 48])
def test_rank_of_dt_that_is_left_to_the_model(hidden: int, tmp_path: Path) -> None:
    """Jamba's rank of dt, "auto" or absent, is what transformers makes of it: not only where 16 divides the width."""
    values = checkpoints.TINY["jamba"] | {"hidden_size": hidden, "head_dim": 8}
    expected = transformers.AutoConfig.for_model("jamba", **values).mamba_dt_rank
    for spelling in ({"mamba_dt_rank": "auto"}, {}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "jamba", **values, **spelling}))
        branches = (branch for layer in read_model_config(tmp_path).layers for branch in layer.branches())
        ranks = {branch.dt_rank for branch in branches if isinstance(branch, Mamba1Config)}
        assert ranks == {expected}
