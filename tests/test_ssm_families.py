"""Bamba, Falcon-H1, Mamba, Mamba-2, Falcon Mamba, Nemotron-H, Zamba and Zamba2: configs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import mapped, saved_config, through_transformers

from hybridtrt.converters.ffns import MlpConfig, MoeConfig
from hybridtrt.converters.mixers import AttentionConfig, Mamba1Config, Mamba2Config

SSM = ("bamba", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h", "zamba", "zamba2")
KINDS = st.sampled_from(["mamba", "hybrid", "linear_attention"])
MULTIPLIER = st.floats(0.1, 4.0)
BOOL = st.booleans()
LIMITS = st.sampled_from([[0.0, 0.1], [0.001, float("inf")], [0.5, 2.0]])
EPS = st.floats(1e-8, 1e-3)
KEYS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "bamba": {
        "num_hidden_layers": st.integers(3, 8), "attn_layer_indices": st.one_of(st.none(), st.lists(st.integers(0, 2))),
        "mamba_d_head": st.sampled_from(["auto", 16]), "mamba_n_groups": st.sampled_from([1, 2, 4]),
        "mamba_conv_bias": BOOL, "mamba_proj_bias": BOOL, "attention_bias": BOOL, "mlp_bias": BOOL,
        "num_key_value_heads": st.sampled_from([None, 1, 4]), "rms_norm_eps": EPS, "time_step_limit": LIMITS,
        "partial_rotary_factor": st.just(0.25), "rope_theta": st.just(500.0),
    },
    "falcon_h1": {
        "mamba_d_ssm": st.sampled_from([None, 24, 64]),
        "mamba_rms_norm": BOOL, "mamba_norm_before_gate": BOOL, "mamba_n_groups": st.sampled_from([1, 2, 4]),
        "projectors_bias": BOOL, "mamba_proj_bias": BOOL, "attention_bias": BOOL, "mlp_bias": BOOL,
        **{f"{name}_multiplier": MULTIPLIER for name in (
            "lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")},
        "mlp_multipliers": st.one_of(st.none(), st.lists(MULTIPLIER, min_size=2, max_size=2)),
        "ssm_multipliers": st.one_of(st.none(), st.lists(MULTIPLIER, min_size=5, max_size=5)),
    },
    "mamba": {
        "expand": st.integers(1, 4), "conv_kernel": st.integers(2, 5), "use_bias": BOOL, "use_conv_bias": BOOL,
        "time_step_rank": st.sampled_from(["auto", 1, 7]), "layer_norm_epsilon": EPS, "tie_word_embeddings": BOOL,
    },
    "falcon_mamba": {"mixer_rms_eps": EPS, "time_step_rank": st.sampled_from(["auto", 1, 7]), "use_bias": BOOL},
    "mamba2": {
        "n_groups": st.sampled_from([1, 2, 8]), "use_bias": BOOL, "use_conv_bias": BOOL, "time_step_limit": LIMITS,
        "state_size": st.integers(1, 9), "tie_word_embeddings": BOOL,
    },
    "nemotron_h": {
        "layers_block_type": st.lists(st.sampled_from(["mamba", "attention", "moe", "mlp"]), min_size=1),
        "use_bias": BOOL, "use_conv_bias": BOOL, "mamba_conv_bias": BOOL, "mlp_bias": BOOL, "attention_bias": BOOL,
        "n_groups": st.sampled_from([1, 2, 4]), "mamba_n_groups": st.sampled_from([1, 2, 4]),
        "time_step_min": st.floats(0.0, 1.0), "moe_latent_size": st.sampled_from([None, 8]),
        "norm_topk_prob": BOOL, "routed_scaling_factor": MULTIPLIER, "tie_word_embeddings": BOOL,
        "n_group": st.sampled_from([1, 2]), "layer_norm_epsilon": EPS,
    },
    "zamba": {
        "attn_layer_period": st.integers(1, 5), "attn_layer_offset": st.integers(0, 5),
        "num_hidden_layers": st.integers(3, 12), "layers_block_type": st.none(),
        "attention_head_dim": st.sampled_from([None, 0, 6]), "n_mamba_heads": st.sampled_from([1, 2, 4]),
        "mamba_dt_rank": st.sampled_from(["auto", 3]), "mamba_conv_bias": BOOL, "mamba_proj_bias": BOOL,
        "tie_word_embeddings": BOOL, "rms_norm_eps": EPS, "hidden_act": st.sampled_from(["gelu", "silu"]),
    },
    "zamba2": {
        "num_mem_blocks": st.integers(1, 4), "use_shared_attention_adapter": BOOL, "adapter_rank": st.integers(1, 5),
        "use_mem_rope": BOOL, "use_long_context": BOOL, "add_bias_linear": BOOL, "tie_word_embeddings": BOOL,
        "mamba_ngroups": st.sampled_from([1, 2, 4]), "time_step_min": st.floats(0.0, 1.0), "use_conv_bias": BOOL,
        "intermediate_size": st.sampled_from([None, 0, 48]), "rope_theta": st.just(500.0),
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", SSM)
def test_defaults_are_those_of_the_transformers_class(model_type: str) -> None:
    assert mapped({"model_type": model_type}) == mapped(through_transformers({"model_type": model_type}))


@pytest.mark.parametrize("model_type", SSM)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_configs_map_as_transformers_reads_them(model_type: str, data: st.DataObject) -> None:
    values = saved_config(model_type)
    values.pop("rope_parameters", None)
    keys = data.draw(st.sets(st.sampled_from(sorted(KEYS[model_type]))))
    values |= {key: data.draw(KEYS[model_type][key], key) for key in sorted(keys)}
    if model_type == "zamba2":
        values.pop("hybrid_layer_ids")
        values["layers_block_type"] = data.draw(st.lists(KINDS, min_size=6, max_size=6))
    if model_type == "falcon_h1":
        values["mamba_d_head"] = "auto"
    if model_type == "zamba" and "num_hidden_layers" in keys:
        values["layers_block_type"] = None
    assert mapped(values) == mapped(through_transformers(values))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bamba", {"attn_layer_indices": [3]}, r"attn_layer_indices=\[3\]: expected layers in 0..2"),
        ("bamba", {"mamba_d_head": 7}, r"mamba_n_heads=4 times mamba_d_head=7 is not mamba_expand \* hidden_size = 64"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups=3 does not divide mamba_n_heads=4"),
        ("bamba", {"time_step_limit": None}, "time_step_limit=null: expected two numbers, low then high"),
        ("bamba", {"hidden_act": "gelu"}, 'hidden_act="gelu": expected silu'),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers=.*: expected a list of 5 finite numbers"),
        ("falcon_h1", {"mamba_d_ssm": 30}, "mamba_n_heads=4 times mamba_d_head=8 is not mamba_d_ssm = 30"),
        ("mamba", {"hidden_act": "relu"}, 'hidden_act="relu": expected silu'),
        ("mamba", {"time_step_rank": "all"}, 'time_step_rank="all": expected an integer'),
        ("falcon_mamba", {"mixer_rms_eps": 0}, "mixer_rms_eps=0: expected a finite number > 0"),
        ("mamba2", {"num_heads": 7}, r"num_heads=7 times head_dim=8 is not expand \* hidden_size = 64"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type has the layer type 'conv'"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"},
         r'hybrid_override_pattern="MX": expected a string of M, E, \*, -'),
        ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers=5: expected 6, the number of entries"),
        ("nemotron_h", {"num_experts_per_tok": 5}, r"num_experts_per_tok=5 is not in 1..4"),
        ("nemotron_h", {"n_group": 3}, "n_group=3 does not divide the 4 experts"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act="silu": expected relu2'),
        ("zamba", {"n_mamba_heads": 3}, "n_mamba_heads=3 does not divide the 64 channels"),
        ("zamba", {"attention_hidden_size": 32}, "attention_hidden_size=32: expected 64, twice the hidden size"),
        ("zamba", {"layers_block_type": None, "num_hidden_layers": 2}, "num_hidden_layers=2: expected at least 3"),
        ("zamba2", {"hybrid_layer_ids": [1]}, r"hybrid_layer_ids=\[1\]: expected \[1, 3, 5\]"),
        ("zamba2", {"num_key_value_heads": 2}, "use_shared_attention_adapter=true: expected false"),
        ("zamba2", {"mamba_headdim": 8}, r"n_mamba_heads=4 times 8 channels is not mamba_expand \* hidden_size = 64"),
        ("zamba2", {"layers_block_type": None}, "num_hidden_layers=6: expected 54"),
    ],
)  # fmt: skip
def test_errors_name_key_value_and_expectation(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapped(saved_config(model_type) | changes)


def test_every_spelling_of_the_layers_of_nemotron() -> None:
    values = saved_config("nemotron_h")
    without = {key: value for key, value in values.items() if key != "layers_block_type"}
    for spelling in (
        {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]},
        {"layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]},
        {"hybrid_override_pattern": "ME*-ME", "num_hidden_layers": 6},
        {"hybrid_override_pattern": "ME*-ME", "layers_block_type": None},
    ):
        assert mapped(without | spelling) == mapped(values)
    kinds = [type(next(layer.branches())) for layer in mapped(values).layers]
    assert kinds == [Mamba2Config, MoeConfig, AttentionConfig, MlpConfig, Mamba2Config, MoeConfig]


def test_the_default_layers_of_zamba() -> None:
    values = saved_config("zamba") | {"layers_block_type": None, "num_hidden_layers": 10}
    config = mapped(values)
    hybrid = [i for i, layer in enumerate(config.layers) if len(layer.blocks) == 2]
    assert hybrid == [2, 5, 8]  # two of Mamba and a hybrid one, then period 3 from offset 2
    assert config == mapped(values | {"layer_types": None})


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_a_stored_width_counts_more_than_the_factor(model_type: str) -> None:
    """As transformers reads it: files hold both, and the factor need not be that of the weights."""
    values = {"model_type": model_type, "hidden_size": 32, "expand": 16}
    for stored, inner in (({}, 512), ({"intermediate_size": 48}, 48)):
        (mixer,) = mapped(values | stored).layers[0].branches()
        assert isinstance(mixer, Mamba1Config)
        assert mixer.inner == inner == transformers.AutoConfig.for_model(**values, **stored).intermediate_size


def test_dt_is_clamped_for_every_token_as_in_the_full_forward() -> None:
    """Cached steps of transformers forget the limit of these two; the parity tests compare with the full forward."""
    for variant in ("nemotron_h.dense", "zamba2.plain"):
        mixers = [branch for layer in mapped(saved_config(variant)).layers for branch in layer.branches()]
        assert {mixer.dt_min for mixer in mixers if isinstance(mixer, Mamba2Config)} == {0.3}
    (mixer,) = mapped(saved_config("mamba2.biases")).layers[0].branches()
    assert isinstance(mixer, Mamba2Config)
    assert (mixer.dt_min, mixer.dt_max) == (0.1, 0.7)


def test_saved_descriptions_come_back() -> None:
    for variant in SSM:
        config = mapped(saved_config(variant))
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
