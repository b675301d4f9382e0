"""Families of linear attention: random configs map as transformers' classes read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import mapped, saved_config, through_transformers

BOOL = st.booleans()
FACTOR = st.floats(0.1, 4.0)
COUNT = st.sampled_from([1, 2, 4])
KINDS = st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=4, max_size=4)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "rms_norm_eps": st.floats(1e-8, 1e-3),
    "tie_word_embeddings": BOOL,
    "max_position_embeddings": st.integers(1, 10**6),
    "eos_token_id": st.one_of(st.none(), st.integers(0, 95), st.lists(st.integers(0, 95), min_size=1, max_size=3)),
}
ROPE = st.sampled_from(
    [
        None,
        {"rope_type": "default", "rope_theta": 7.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    ]
)
QWEN = {
    "layer_types": st.one_of(st.none(), KINDS), "full_attention_interval": COUNT, "attention_bias": BOOL,
    "linear_num_key_heads": COUNT, "linear_num_value_heads": st.just(4), "linear_conv_kernel_dim": st.integers(2, 5),
    "head_dim": st.sampled_from([16, 32]), "num_key_value_heads": COUNT, "rope_parameters": ROPE,
}  # fmt: skip
EXPERTS = {
    "num_experts": st.sampled_from([4, 8]), "num_experts_per_token": st.integers(1, 2), "moe_renormalize": BOOL,
    "num_shared_experts": st.integers(1, 3), "routed_scaling_factor": FACTOR,
    "q_lora_rank": st.sampled_from([None, 12]),
    "num_expert_group": st.just(2), "topk_group": st.sampled_from([1, 2]), "attention_bias": BOOL,
    "v_head_dim": st.integers(1, 9), "layer_types": st.one_of(st.none(), KINDS), "kv_lora_rank": st.integers(1, 20),
}  # fmt: skip
KEYS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN | {"num_experts": st.sampled_from([2, 8]), "shared_expert_intermediate_size": COUNT},
    "minimax": {
        "layer_types": st.one_of(st.none(), KINDS), "head_dim": st.sampled_from([None, 6, 12]),
        "num_key_value_heads": COUNT,
        "sliding_window": st.sampled_from([None, 1, 9]), "rope_parameters": ROPE,
        **{f"{part}_alpha_factor": FACTOR for part in ("full_attn", "linear_attn", "mlp")},
        **{f"{part}_beta_factor": FACTOR for part in ("full_attn", "linear_attn", "mlp")},
    },
    "olmo_hybrid": {
        "linear_num_key_heads": st.sampled_from([None, 1, 2]), "linear_key_head_dim": st.sampled_from([None, 5]),
        "linear_value_head_dim": st.sampled_from([None, 3]), "linear_allow_neg_eigval": BOOL, "attention_bias": BOOL,
        "num_key_value_heads": st.sampled_from([None, 1, 4]), "linear_conv_kernel_dim": st.integers(2, 5),
        "rope_parameters": ROPE,
        "layer_types": st.one_of(st.none(), KINDS.filter(lambda kinds: len(set(kinds)) == 2)),
    },
    "kimi_linear": EXPERTS | {
        "linear_head_dim": st.integers(1, 9), "linear_num_heads": st.integers(1, 5), "mlp_layer_types": st.none(),
        "first_k_dense_replace": st.integers(0, 5),
        "linear_attn_config": st.sampled_from([
            {}, {"head_dim": 3}, {"num_heads": 7, "short_conv_kernel_size": 2},
            {"full_attn_layers": [1, 3], "kda_layers": [4, 2]}, {"full_attn_layers": [2]},
        ]),
    },
    "bailing_hybrid": EXPERTS | {
        "layer_group_size": COUNT, "kda_safe_gate": BOOL, "kda_lower_bound": st.floats(-9.0, -0.1),
        "mlp_layer_types": st.none(), "first_k_dense_replace": st.integers(0, 5), "rope_parameters": ROPE,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", KEYS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_configs_map_as_transformers_reads_them(model_type: str, data: st.DataObject) -> None:
    values = saved_config(model_type) | {"num_hidden_layers": 4, "layer_types": None}
    own = COMMON | KEYS[model_type]
    keys = data.draw(st.sets(st.sampled_from(sorted(own))))
    changes = {key: data.draw(own[key], key) for key in sorted(keys)}
    if "max_position_embeddings" in changes and "model_max_length" in values:
        changes["model_max_length"] = changes.pop("max_position_embeddings")
    values |= changes
    assert mapped(values) == mapped(through_transformers(values))
