"""Config mapping of the families with windows, sinks, short convolutions and RG-LRU, in every spelling."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, tiny_checkpoint, tiny_model
from engines import make_engine, oracle_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import mapped, saved_config, through_transformers

from hybridtrt.build.engine import BuildConfig
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.mixers import AttentionConfig, RgLruConfig, ShortConvConfig
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.load import load_runner
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.verify import agreeing_tokens

FAMILIES = ("gemma3_text", "gpt_oss", "granitemoe_swa", "lfm2", "lfm2_moe", "lfm3", "recurrent_gemma")


def attentions(config: ModelConfig) -> list[AttentionConfig]:
    return [branch for layer in config.layers for branch in layer.branches() if isinstance(branch, AttentionConfig)]


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def as_transformers(values: dict[str, Any]) -> ModelConfig:
    """The description of a config, after checking that it is that of the config as transformers understands it."""
    config = mapped(values)
    assert config == mapped(through_transformers(values))
    return config


@pytest.mark.parametrize("model_type", FAMILIES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_random_configs_map_as_transformers_reads_them(model_type: str, data: st.DataObject) -> None:
    flags = (
        "attention_bias", "block_auto_adjust_ff_dim", "conv_bias", "norm_topk_prob", "tie_word_embeddings",
        "use_attention_gate", "use_expert_bias", "use_sandwich_norm",
    )  # fmt: skip
    optional: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(flags, st.booleans()) | {
        "attention_multiplier": st.floats(0.1, 2.0),
        "attention_window_size": st.integers(1, 99),
        "block_ffn_dim_multiplier": st.floats(0.5, 2.0),
        "block_multiple_of": st.integers(1, 40),
        "block_types": st.lists(st.sampled_from(["recurrent", "attention"]), min_size=1, max_size=4),
        "conv1d_width": st.integers(2, 5),
        "conv_L_cache": st.integers(2, 8),
        "final_logit_softcapping": st.none() | st.floats(1.0, 50.0),
        "full_attn_idxs": st.none() | st.lists(st.integers(0, 4), max_size=3),
        "intermediate_size": st.integers(4, 200),
        "layer_rope_theta": st.none() | st.lists(st.sampled_from([0, 0.0, 1e4, 500]), min_size=4, max_size=4),
        "logits_scaling": st.floats(0.5, 16.0),
        "logits_soft_cap": st.floats(1.0, 50.0),
        "lru_width": st.none() | st.sampled_from([16, 64]),
        "num_dense_layers": st.integers(0, 4),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "query_pre_attn_scalar": st.integers(1, 300),
        "routed_scaling_factor": st.floats(0.5, 3.0),
        "shared_intermediate_size": st.integers(0, 30),
        "sliding_window": st.integers(1, 99),
        "swiglu_limit": st.floats(0.1, 9.0),
    }
    values = saved_config(model_type)
    as_transformers(values | {key: data.draw(value, key) for key, value in optional.items() if key in values})


def test_windows_are_page_groups_of_their_own() -> None:
    config = mapped(saved_config("gemma3_text"))
    specs = [spec for spec in config.caches() if isinstance(spec, PageSpec)]
    assert [(spec.group, spec.window) for spec in specs] == [("window_8", 8)] * 5 + [("full_attention", None)]


def test_the_longest_requests_run_together_behind_a_window(tmp_path: Path) -> None:
    """A full batch at the engine's limits: prompts longer than the window, and pages that end inside it."""
    limits = BuildConfig(max_batch_size=3, max_num_tokens=16, max_seq_len=61, tokens_per_block=4)
    model = Path(shutil.copytree(tiny_checkpoint("gemma3_text"), tmp_path / "model"))
    engine = Engine(load_runner(make_engine(model, limits)), options=EngineOptions(poison=True))
    prompts = [tuple((7 * i + 3 * t) % 96 for t in range(57)) for i in range(3)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    results = engine.generate([Request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    engine.check_integrity()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        expected = oracle_logits(tiny_model("gemma3_text"), [*prompt, *result.token_ids])
        assert agreeing_tokens(expected[len(prompt) - 1 : -1], result.token_ids) == 4


def test_gemma3_in_the_spelling_of_version_4() -> None:
    old = without(saved_config("gemma3_text"), "layer_types", "_sliding_window_pattern", "rope_parameters")
    old |= {"sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 100.0}
    config = as_transformers(old | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [one.window for one in attentions(config)] == [8, 8, None] * 2
    full, local = config.ropes
    assert full.inv_freq == pytest.approx([5e5 ** (-i / 4) / 8 for i in range(4)])
    assert local.inv_freq == pytest.approx([100.0 ** (-i / 4) for i in range(4)])
    full, local = as_transformers(without(old, "rope_theta", "rope_local_base_freq")).ropes
    assert full.inv_freq[1] == pytest.approx(1e6**-0.25)
    assert local.inv_freq[1] == pytest.approx(1e4**-0.25)
    assert config.embedding_multiplier == math.sqrt(32)


def test_gpt_oss_without_rope_parameters_takes_yarn() -> None:
    values = saved_config("gpt_oss")
    for rest in (without(values, "rope_parameters"), values | {"rope_parameters": None}):
        assert as_transformers(rest) == mapped(values)
        assert mapped(rest).ropes[0].attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    old = without(values, "rope_parameters") | {"rope_theta": 1000.0, "rope_scaling": scaled}
    assert as_transformers(old).ropes[0].attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_granite_has_a_rotary_table_a_base() -> None:
    values = saved_config("granitemoe_swa") | {"layer_rope_theta": [1e4, 0, 500, 1e4]}
    config = as_transformers(values)
    assert [one.rope for one in attentions(config)] == [1, None, 0, 1]
    assert [rope.inv_freq[1] for rope in config.ropes] == pytest.approx([500**-0.25, 1e4**-0.25])
    old = without(saved_config("granitemoe_swa"), "rope_parameters", "layer_rope_theta") | {"rope_theta": 500.0}
    assert as_transformers(old).ropes == config.ropes[:1]


def test_lfm2_computes_the_width_of_its_mlp() -> None:
    values = saved_config("lfm2.wide")
    model = tiny_model("lfm2.wide")
    mlp = list(mapped(values).layers[0].branches())[1]
    assert mlp == MlpConfig(model.model.layers[0].feed_forward.w1.weight.shape[0])
    older = without(values, "intermediate_size", "tie_word_embeddings") | {"block_ff_dim": 64, "tie_embedding": False}
    assert as_transformers(older) == mapped(values)
    everything = without(values, "layer_types", "full_attn_idxs")
    assert len(attentions(as_transformers(everything))) == 4
    mixers = [next(layer.branches()) for layer in mapped(values).layers]
    assert mixers[0] == ShortConvConfig(channels=32, conv_width=5, bias=True)


def test_recurrent_gemma_repeats_its_blocks() -> None:
    values = saved_config("recurrent_gemma") | {"num_hidden_layers": 7}
    config = as_transformers(values)
    kinds = [next(layer.branches()).kind for layer in config.layers]
    assert kinds == ["rg_lru", "rg_lru", "attention", "rg_lru", "rg_lru", "attention", "rg_lru"]
    assert next(config.layers[0].branches()) == RgLruConfig(channels=32, num_heads=4, conv_width=4)
    assert config.embedding_multiplier == torch.tensor(math.sqrt(32)).bfloat16().item() != math.sqrt(32)
    assert tiny_model("recurrent_gemma").model.normalizer.float().item() == config.embedding_multiplier
    aliased = without(values, "attention_window_size") | {"sliding_window": 5}
    assert {one.window for one in attentions(mapped(aliased))} == {5}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma3_text", {"sliding_window": None}, "sliding_window=null: expected an integer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true: expected false"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: expected false or null"),
        ("gemma3_text", {"hidden_activation": "relu"}, 'hidden_activation="relu": expected gelu or'),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1.0}},
            "expected those of full_attention and",
        ),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha=2.0: expected 1.702"),
        ("gpt_oss", {"swiglu_limit": -7}, "swiglu_limit=-7: expected a finite number > 0"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window=0: expected an integer in 1"),
        ("granitemoe_swa", {"layer_rope_theta": [1e4, 0]}, "expected a list of 4 finite numbers >= 0"),
        ("granitemoe_swa", {"layer_rope_theta": [1e4, 0, -1, 0]}, "expected a list of 4 finite numbers >= 0"),
        ("granitemoe_swa", {"num_local_experts": 0}, "num_local_experts=0: expected an integer in 1"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1: expected an integer in 2"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types has the layer type 'linear_attention'"),
        ("lfm2.wide", {"block_ffn_dim_multiplier": 1e300}, "block_ffn_dim_multiplier=1e.300: expected"),
        ("lfm2.wide", {"intermediate_size": 1, "block_ffn_dim_multiplier": 0.9}, "two thirds of intermediate_size=1"),
        ("lfm2_moe", {"layer_types": None}, "layer_types=null: expected a list of layer types"),
        ("lfm3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "expected sliding_attention"),
        ("recurrent_gemma", {"block_types": ["recurrent", "full"]}, "expected a list of recurrent and attention"),
        ("recurrent_gemma", {"block_types": None}, "block_types=null: expected a list of recurrent and attention"),
        ("recurrent_gemma", {"lru_width": 30}, "num_attention_heads=4 does not divide lru_width=30"),
        (
            "recurrent_gemma",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            'rope_type="yarn": expected',
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(model_type: str, changes: dict[str, Any], message: str) -> None:
    assert model_type in TINY
    with pytest.raises(ValueError, match=message):
        mapped(saved_config(model_type) | changes)


def test_a_window_is_not_looked_at_where_no_layer_has_one() -> None:
    values = saved_config("gpt_oss") | {"layer_types": ["full_attention"] * 2, "sliding_window": None}
    assert [one.window for one in attentions(mapped(values))] == [None, None]
