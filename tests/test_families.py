"""Each family's config mapping against the transformers class, and its weight rules against the modelling code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FAMILIES, TINY, random_model, tiny_checkpoint, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families import families, family
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config
from hybridtrt.converters.model_reader import read_model, read_model_config
from hybridtrt.converters.sources import (
    AddOne,
    Concat,
    Deinterleave,
    DropAxis,
    FirstOf,
    Named,
    Source,
    SplitPairs,
    Stack,
    Transposed,
)

VARIANTS = [name for name in TINY if name.partition(".")[0] in families() and not name.startswith("hybridtrt_")]
WRONG_VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "auto", "silu", 0, 1, 2, 3, -1, 7.5, 1e400, 10**30, [], [1], ["x"], [None], {},
    {"a": 1}, {"__float__": "NaN"},
)  # fmt: skip


def saved_config(model_type: str) -> dict[str, Any]:
    return dict(json.loads((tiny_checkpoint(model_type) / "config.json").read_text()))


def mapped(values: dict[str, Any]) -> ModelConfig:
    return family(values["model_type"]).config(HFConfig(values))


def outcome(values: dict[str, Any]) -> ModelConfig | str:
    try:
        return mapped(values)
    except ValueError as error:
        return str(error)


def through_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers reads it and writes it again, every default filled in."""
    config = transformers.AutoConfig.for_model(**_with_infinities(copy.deepcopy(values)))
    written = json.loads(config.to_json_string(use_diff=False))
    return dict(written) | {"model_type": values["model_type"]}


def _with_infinities(value: Any) -> Any:
    """Undo the spelling of special floats, as transformers does when it loads a file."""
    if isinstance(value, dict):
        return float(value["__float__"]) if "__float__" in value else {k: _with_infinities(v) for k, v in value.items()}
    return [_with_infinities(item) for item in value] if isinstance(value, list) else value


def outcome_or_refusal(values: dict[str, Any]) -> ModelConfig | None:
    result = outcome(values)
    return None if isinstance(result, str) else result


@pytest.mark.parametrize("model_type", families())
def test_defaults_are_those_of_the_transformers_class(model_type: str) -> None:
    """Or there are none, and both refuse: `layer_types` of lfm2_moe, the groups of experts of deepseek_v2."""
    values = {"model_type": model_type}
    assert outcome_or_refusal(values) == outcome_or_refusal(through_transformers(values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_absent_key_takes_the_default_of_the_transformers_class(variant: str) -> None:
    values = saved_config(variant)
    compared = 0
    for key in sorted(set(values) - {"model_type"}):
        rest = {name: value for name, value in values.items() if name != key}
        try:
            expected = through_transformers(rest)
        except Exception:
            continue  # transformers refuses it too, or crashes
        if key == "num_hidden_layers" and "layer_types" in rest:
            continue  # we take the length of the pattern, transformers its default
        assert outcome_or_refusal(rest) == outcome_or_refusal(expected), key
        compared += 1
    assert compared > len(values) / 2


@pytest.mark.parametrize("model_type", FAMILIES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_configs_map_as_transformers_reads_them(model_type: str, data: st.DataObject) -> None:
    values = saved_config(model_type)
    numbers = {
        key: st.integers(1, 8)
        for key in ("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "num_hidden_layers")
        if key in values
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "rms_norm_eps": st.floats(1e-8, 1e-3),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mamba_proj_bias": st.booleans(),
        "mamba_conv_bias": st.booleans(),
        "norm_topk_prob": st.booleans(),
        "residual_multiplier": st.floats(0.1, 2.0),
        "logits_scaling": st.floats(0.5, 16.0),
        "position_embedding_type": st.sampled_from([None, "rope", "nope"]),
        "eos_token_id": st.one_of(st.none(), st.integers(0, 95), st.lists(st.integers(0, 95), max_size=3)),
        "num_local_experts": st.sampled_from([0, 2, 4]),
        "num_experts": st.sampled_from([0, 2, 4]),
        "mlp_only_layers": st.lists(st.integers(0, 7), max_size=3),
        "mamba_dt_rank": st.sampled_from(["auto", 1, 3]),
        "mamba_d_head": st.sampled_from(["auto", 16]),
        "time_step_limit": st.sampled_from([[0.0, 0.1], [0.001, float("inf")], [0.5, 2.0]]),
    }
    changes = {key: data.draw(value, key) for key, value in numbers.items()}
    changes |= {key: data.draw(value, key) for key, value in optional.items() if key in values}
    if "layer_types" in values:
        kinds = st.sampled_from(["linear_attention", "full_attention"])
        layers = changes["num_hidden_layers"]
        changes["layer_types"] = data.draw(st.lists(kinds, min_size=layers, max_size=layers))
    for offset, period in (("attn_layer_offset", "attn_layer_period"), ("expert_layer_offset", "expert_layer_period")):
        if period in changes:
            changes[offset] = data.draw(st.integers(0, changes[period] - 1), offset)
    values |= changes
    assert mapped(values) == mapped(through_transformers(values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_config_value_makes_anything_but_a_value_error_or_a_model(variant: str) -> None:
    values = saved_config(variant)
    refused = accepted = 0
    for key in values:
        for wrong in WRONG_VALUES:
            changed = values | {key: wrong}
            try:
                config = family(changed["model_type"]).config(HFConfig(changed))
                config.weight_table()
                assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
                accepted += 1
            except ValueError:
                refused += 1
    assert refused > accepted / 5


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head_dim", None, "head_dim=null: expected an integer"),
        ("num_key_value_heads", 3, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ("num_experts_per_tok", 5, "num_experts_per_tok=5 is not in 1..4"),
        ("hidden_act", "gelu", 'hidden_act="gelu": expected silu'),
        ("vocab_size", True, "vocab_size=true: expected an integer"),
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000: expected an integer in 1..4096"),
        ("eos_token_id", 96, r"eos_token_id=96: expected token ids in 0..95 \(vocab_size=96\)"),
        ("bos_token_id", [1], r"bos_token_id=\[1\]: expected one token id"),
        ("quantization_config", {"quant_method": "awq"}, "quantization_config with quant_method='awq'"),
        ("model_type", "llama", "model_type='llama' is not supported; supported: .*jamba, .*qwen3_next"),
        ("model_type", None, "model_type=None is not supported; supported: .*jamba, .*qwen3_next"),
        ("dtype", "float8_e4m3fn", 'dtype="float8_e4m3fn": expected bfloat16 or float16 or float32'),
    ],
)
def test_errors_name_key_value_expectation_and_file(
    model_type: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(saved_config(model_type) | {key: value}))
    with pytest.raises(ValueError, match=message) as error:
        read_model(tmp_path)
    if key != "model_type":
        assert "config.json" in str(error.value)


@pytest.mark.parametrize("model_type", ["qwen3_next", "granitemoehybrid"])
def test_layer_patterns(model_type: str) -> None:
    values = saved_config(model_type)
    pattern = values["layer_types"]
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    assert mapped(values | {"layer_types": [old[kind] for kind in pattern]}) == mapped(values)
    without_count = {key: value for key, value in values.items() if key != "num_hidden_layers"}
    assert mapped(without_count) == mapped(values)
    with pytest.raises(ValueError, match="expected 2, the number of entries of the layer pattern"):
        mapped(values | {"layer_types": pattern[:2]})
    with pytest.raises(ValueError, match="layer_types has the layer type 'sliding_attention'"):
        mapped(values | {"layer_types": ["sliding_attention", *pattern[1:]]})


def test_granite_without_pattern_positions_and_experts() -> None:
    values = {key: value for key, value in saved_config("granitemoehybrid").items() if key != "layer_types"}
    config = mapped(values | {"num_local_experts": 0, "position_embedding_type": None, "layers_block_type": None})
    assert config.ropes == ()
    for layer in config.layers:
        mixer, ffn = layer.branches()
        assert isinstance(mixer, Mamba2Config)
        assert ffn == MlpConfig(intermediate=32)
        assert [block.residual_multiplier for block in layer.blocks] == [0.5, 0.5]
    config = mapped(saved_config("granitemoehybrid"))
    assert (config.embedding_multiplier, config.logits_multiplier) == (3.0, 0.5)
    attention = next(config.layers[1].branches())
    assert isinstance(attention, AttentionConfig)
    assert (attention.scale, attention.rope) == (0.25, 0)


@pytest.mark.parametrize(
    ("changes", "theta", "rotary_dim"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}, 5e5, 8),
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5, 4),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 1.0}, 5e5, 16),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 5e5, "partial_rotary_factor": 0.5}, 7.0, 8),
        ({"rope_parameters": None, "rope_scaling": {"type": "default"}, "rope_theta": 100}, 100.0, 4),
        ({"rope_parameters": None}, 1e4, 4),
    ],
)
def test_both_spellings_of_rope(changes: dict[str, Any], theta: float, rotary_dim: int) -> None:
    values = saved_config("qwen3_next") | changes
    (rope,) = mapped(values).ropes
    assert rope.inv_freq == pytest.approx([theta ** (-i / rotary_dim) for i in range(0, rotary_dim, 2)])
    assert rope.attention_factor == 1.0
    assert mapped(values) == mapped(through_transformers(values))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "ntk", "factor": 4.0, "rope_theta": 1e4},
        {"type": "linear"},
        {"rope_type": None},
        {"rope_theta": 0},
        {"rope_theta": "1e4"},
        {"partial_rotary_factor": 0.0},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.2},
        {"full_attention": {"rope_type": "default"}, "rope_type": "proportional"},
        "default",
    ],
)
def test_rope_that_is_not_understood_is_refused(rope: object) -> None:
    with pytest.raises(ValueError, match=r"rope|rotary"):
        mapped(saved_config("qwen3_next") | {"rope_parameters": rope})


def test_rope_of_a_model_without_positions_is_not_looked_at() -> None:
    values = saved_config("granitemoehybrid") | {"rope_parameters": {"rope_type": "axial"}}
    with pytest.raises(ValueError, match='rope_type="axial"'):
        mapped(values)
    assert mapped(values | {"position_embedding_type": "nope"}).ropes == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, "\xff"])
def test_config_that_is_no_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: (is not valid JSON|holds a JSON)"):
        read_model_config(tmp_path)


def test_config_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: cannot be read \(No such file or directory\)"):
        read_model_config(tmp_path)


def test_generation_config_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(saved_config("jamba")))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "pad_token_id": 9}))
    config = read_model_config(tmp_path)
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ((5, 7), 9, 1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 96}))
    with pytest.raises(ValueError, match=r"eos_token_id=96: .*generation_config\.json"):
        read_model_config(tmp_path)


def test_dtype_in_both_spellings(tmp_path: Path) -> None:
    values = {key: value for key, value in saved_config("jamba").items() if key != "dtype"}
    for extra, expected in (({}, None), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16")):
        (tmp_path / "config.json").write_text(json.dumps(values | extra))
        assert read_model(tmp_path).dtype == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_weight_has_a_source_and_every_shape_fits(model_type: str) -> None:
    values = saved_config(model_type)
    for key in ("attention_bias", "mamba_proj_bias", "tie_word_embeddings"):
        values |= {key: True} if key in values else {}
    config = mapped(values)
    rules = family(model_type).sources(config)
    assert set(config.weight_table()) | {"lm_head.weight"} == set(rules)
    model = random_model(
        model_type, {key: value for key, value in values.items() if key in TINY[model_type] or value is True}
    )
    on_disk = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    used = {"lm_head.weight"}
    for name, spec in config.weight_table().items():
        rule = rules[name]
        source = rule.choose(spec.shape, on_disk) if isinstance(rule, FirstOf) else rule
        needed = dict(source.tensors(spec.shape))
        assert {tensor: on_disk.get(tensor) for tensor in needed} == needed
        used |= set(needed)
    assert used == set(on_disk)


def canonical(model_type: str, name: str) -> torch.Tensor:
    """A canonical weight of the tiny model."""
    model = read_model(tiny_checkpoint(model_type))
    shape = model.config.weight_table()[name].shape
    rule = model.family.sources(model.config)[name]
    reader = CheckpointReader(tiny_checkpoint(model_type))
    source: Source = rule.choose(shape, reader.names) if isinstance(rule, FirstOf) else rule
    return torch.cat([piece.reshape(-1) for piece in source.pieces(reader.read)]).reshape(shape)


@torch.no_grad()
def test_gated_delta_projection_is_split_as_the_model_splits_it() -> None:
    module = tiny_model("qwen3_next").model.layers[0].linear_attn
    x = torch.randn(1, 5, 32)
    parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    expected = torch.cat([part.reshape(1, 5, -1) for part in parts], dim=-1)
    torch.testing.assert_close(x @ canonical("qwen3_next", "layers.0.gated_delta.in_proj.weight").T, expected)


@torch.no_grad()
def test_query_and_output_gate_are_split_as_the_model_splits_them() -> None:
    module = tiny_model("qwen3_next").model.layers[3].self_attn
    x = torch.randn(1, 5, 32)
    query, gate = module.q_proj(x).view(1, 5, 4, 32).chunk(2, dim=-1)
    parts = (query.reshape(1, 5, -1), gate.reshape(1, 5, -1), module.k_proj(x), module.v_proj(x))
    qkv = canonical("qwen3_next", "layers.3.attention.qkv.weight")
    torch.testing.assert_close(x @ qkv.T, torch.cat(parts, dim=-1))


@torch.no_grad()
def test_only_the_zero_centred_norms_are_shifted() -> None:
    model = tiny_model("qwen3_next").model
    for name, stored, shift in (
        ("final_norm.weight", model.norm.weight, 1.0),
        ("layers.0.gated_delta.pre_norm.weight", model.layers[0].input_layernorm.weight, 1.0),
        ("layers.0.moe.pre_norm.weight", model.layers[0].post_attention_layernorm.weight, 1.0),
        ("layers.3.attention.q_norm.weight", model.layers[3].self_attn.q_norm.weight, 1.0),
        ("layers.0.gated_delta.norm.weight", model.layers[0].linear_attn.norm.weight, 0.0),
    ):
        assert torch.equal(canonical("qwen3_next", name), stored + shift)
    jamba = tiny_model("jamba").model.final_layernorm.weight
    assert torch.equal(canonical("jamba", "final_norm.weight"), jamba)


def test_transforms() -> None:
    tensors = {"a": torch.arange(12).reshape(6, 2), "b": torch.arange(2).reshape(1, 2), "c": torch.zeros(3, 1, 4)}
    tensors |= {"d": torch.arange(12).reshape(2, 3, 2), "e": torch.arange(8).reshape(1, 2, 4)}
    tensors["f"] = tensors["e"].reshape(2, 4)

    def result(source: Source, shape: tuple[int, ...]) -> list[int]:
        for name, needed in source.tensors(shape):
            assert tuple(tensors[name].shape) == needed
        return torch.cat([piece.reshape(-1) for piece in source.pieces(tensors.__getitem__)]).int().tolist()

    assert result(Named("a"), (6, 2)) == list(range(12))
    assert result(Concat((Named("a"), Named("b")), rows=(6, 1)), (7, 2)) == [*range(12), 0, 1]
    assert result(Concat((Named("b"), Named("b"))), (2, 2)) == [0, 1, 0, 1]
    assert result(Stack((Named("b"), Named("b"))), (2, 1, 2)) == [0, 1, 0, 1]
    assert result(Deinterleave("a", 2, (1, 2)), (6, 2)) == [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]
    assert result(AddOne("b"), (1, 2)) == [1, 2]
    assert result(DropAxis("c"), (3, 4)) == [0] * 12
    assert result(Transposed("d"), (2, 2, 3)) == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert result(SplitPairs(Transposed("e")), (1, 4, 2)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert result(SplitPairs(Named("f")), (2, 4)) == [0, 2, 1, 3, 4, 6, 5, 7]
    either = FirstOf((Named("x"), Named("b")))
    assert either.choose((1, 2), tensors) == Named("b")
    assert either.choose((1, 2), {}) == Named("x")
