"""Mixtral, MiniMax-M2, Phi-3.5-MoE, DeepSeek-V2 and V3: both spellings, published sizes, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checkpoints import tiny_model
from test_families import canonical, mapped, saved_config, through_transformers

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.describe import describe
from hybridtrt.converters.ffns import MoeConfig
from hybridtrt.converters.mixers import AttentionConfig, MlaConfig

YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V2 = {
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}


def branches(config: ModelConfig, layer: int = -1) -> list[Any]:
    return list(config.layers[layer].branches())


@pytest.mark.parametrize(
    ("model_type", "values", "parameters", "floats"),
    [
        ("mixtral", {}, 46_702_792_704, 32 * 2 * 8 * 128),
        ("phimoe", {"attention_bias": True, "lm_head_bias": True}, 41_873_153_344, 32 * 2 * 8 * 128),
        ("minimax_m2", {"rotary_dim": 64}, 228_689_764_864, 62 * 2 * 8 * 128),
        ("deepseek_v2", DEEPSEEK_V2, 235_741_434_880, 60 * (512 + 64)),
        ("deepseek_v3", {"rope_scaling": YARN}, 671_026_419_200, 61 * (512 + 64)),
    ],
)
def test_published_models(model_type: str, values: dict[str, Any], parameters: int, floats: int) -> None:
    summary = describe(mapped({"model_type": model_type, **values}))
    assert summary.parameters == parameters
    assert summary.kv_bytes_per_token == {"full_attention": 4 * floats}


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("deepseek_v3", {"rope_scaling": YARN, "rope_theta": 5e4, "num_nextn_predict_layers": 1}),
        ("deepseek_v3", {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 5e4}}),
        ("deepseek_v3", {"q_lora_rank": None, "norm_topk_prob": None, "rope_interleave": None}),
        ("deepseek_v2", DEEPSEEK_V2),
        ("deepseek_v2", {"num_experts_per_tok": 4, "num_key_value_heads": None, "n_group": 8, "topk_group": None}),
        ("minimax_m2", {"rotary_dim": 64, "rope_theta": 1e6}),
        ("minimax_m2", {"rotary_dim": 64, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
        ("minimax_m2", {"partial_rotary_factor": 0.25}),
        ("mixtral", {"head_dim": None, "sliding_window": 4096, "rope_theta": 1e4}),
        ("phimoe", {"rope_scaling": None, "rope_theta": 1e4, "sliding_window": None}),
    ],
)
def test_both_spellings(model_type: str, values: dict[str, Any]) -> None:
    values = {"model_type": model_type, **values}
    assert mapped(values) == mapped(through_transformers(values))


def test_what_deepseek_reads() -> None:
    config = mapped({"model_type": "deepseek_v3", "rope_scaling": YARN})
    mixer, moe = branches(config)
    assert isinstance(mixer, MlaConfig)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.ropes[0].attention_factor == 1.0
    assert isinstance(moe, MoeConfig)
    assert (moe.router.scaling, moe.router.num_groups, moe.router.top_groups) == (2.5, 8, 4)
    assert moe.router.selection_bias
    assert [branches(config, i)[1].kind for i in range(5)] == ["mlp"] * 3 + ["moe"] * 2
    plain = branches(mapped({"model_type": "deepseek_v3"}))[0]
    assert plain.scale == pytest.approx(192**-0.5)


def test_what_phimoe_reads() -> None:
    config = mapped(saved_config("phimoe.long") | {"model_type": "phimoe"})
    attention, moe = branches(config)
    assert isinstance(attention, AttentionConfig)
    assert (attention.bias, attention.dense_bias, attention.window) == (True, True, 8)
    assert (moe.router.scoring, moe.router.jitter_eps, moe.top_k) == ("sparsemixer", 0.2, 2)
    assert (config.norm, config.head_bias) == ("layer", True)
    assert (config.ropes[0].attention_factor, config.ropes[0].max_positions) == (1.2, 256)


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("mixtral", "sliding_window", 0, "sliding_window=0: expected an integer in 1"),
        ("mixtral", "num_key_value_heads", None, "num_key_value_heads=null: expected an integer"),
        ("mixtral", "num_experts_per_tok", 5, r"num_experts_per_tok=5 is not in 1\.\.4 \(number of experts\)"),
        ("minimax_m2", "rotary_dim", 12, "partial_rotary_factor=1.5: expected a part of head_dim=8"),
        ("phimoe", "num_experts_per_tok", 1, r"num_experts_per_tok=1: expected an integer in 2\.\.2"),
        ("phimoe", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}, 'rope_type="yarn": expected default or lo'),
        ("phimoe", "rope_parameters", {"rope_type": "longrope"}, "short_mscale=absent: expected a value"),
        ("deepseek_v2", "topk_method", "noaux_tc", 'topk_method="noaux_tc": expected greedy or group_limited_greedy'),
        ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob=true: expected false"),
        ("deepseek_v2", "num_experts_per_tok", None, "num_experts_per_tok=null: expected an integer"),
        ("deepseek_v2.groups", "n_group", None, "n_group=null: expected an integer"),
        ("deepseek_v2.groups", "topk_group", 1, "num_experts_per_tok=3 exceeds the 2 experts of topk_group=1 groups"),
        ("deepseek_v3", "n_group", 3, "n_group=3 does not divide the 8 experts"),
        ("deepseek_v3", "num_key_value_heads", 2, "num_key_value_heads=2: expected num_attention_heads=4"),
        ("deepseek_v3", "qk_rope_head_dim", 7, "7 rotary channels of head_dim=7: expected an even number"),
        ("deepseek_v3.halves", "rope_parameters", {"rope_type": "yarn", "mscale_all_dim": 1.0}, "factor=absent: exp"),
        ("deepseek_v3.halves", "rope_parameters", {"rope_type": "linear", "factor": 9, "mscale_all_dim": 1e200},
         r"mscale_all_dim=1e\+200: expected one that gives a finite scale"),
    ],
)  # fmt: skip
def test_values_that_are_refused(variant: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapped(saved_config(variant) | {key: value})


@torch.no_grad()
def test_rotary_rows_are_split_off_and_laid_in_halves() -> None:
    module = tiny_model("deepseek_v2.groups").model.layers[0].self_attn
    x = torch.randn(5, 32)
    heads = (x @ module.q_proj.weight.T).unflatten(1, (4, 16))
    plain, pairs = heads.split([8, 8], dim=-1)
    halves = torch.cat([pairs[..., ::2], pairs[..., 1::2]], dim=-1)
    q = canonical("deepseek_v2.groups", "layers.0.mla.q.weight")
    torch.testing.assert_close(x @ q.T, torch.cat([plain.flatten(1), halves.flatten(1)], dim=1))
    stored = module.kv_a_proj_with_mqa.bias
    expected = torch.cat([stored[:16], stored[16::2], stored[17::2]])
    assert torch.equal(canonical("deepseek_v2.groups", "layers.0.mla.kv_down.bias"), expected)
