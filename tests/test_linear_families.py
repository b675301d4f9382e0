"""Families of linear attention: what their configs and checkpoints may spell otherwise, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model
from safetensors.torch import load_file, save_file

from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.convert import convert
from hybridtrt.converters.families import family
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.matching import match_sources
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig, KdaConfig, LightningConfig
from hybridtrt.converters.model_reader import read_model
from hybridtrt.converters.sources import Concat, Constant, FirstOf, Named, Stack, either, renamed

Tensors = dict[str, torch.Tensor]


def values_of(variant: str, **changes: Any) -> dict[str, Any]:
    return dict(json.loads((tiny_checkpoint(variant) / "config.json").read_text())) | changes


def mapped(values: dict[str, Any]) -> ModelConfig:
    return family(values["model_type"]).config(HFConfig(values))


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def changed(variant: str, folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    """The folder of a tiny model with other tensors, and another config if one is given."""
    shutil.copytree(tiny_checkpoint(variant), folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(variant: str, form: str = "hub") -> Tensors:
    return dict(load_file(tiny_checkpoint(variant, form) / "model.safetensors"))


def weights(folder: Path, out: Path) -> Tensors:
    """The canonical weights of a Hugging Face folder."""
    convert(folder, out)
    return dict(load_file(out / "rank0.safetensors"))


def assert_same_weights(variant: str, folder: Path, tmp_path: Path) -> None:
    got, want = weights(folder, tmp_path / "got"), weights(tiny_checkpoint(variant), tmp_path / "want")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5_moe"])
def test_text_model_in_the_names_of_version_4(variant: str, tmp_path: Path) -> None:
    old = {
        ("language_model." + name.replace("model.language_model.", "model.") if "visual" not in name else name): tensor
        for name, tensor in tensors_of(variant).items()
    }
    assert_same_weights(variant, changed(variant, tmp_path / "old", old), tmp_path)


def test_a_text_model_saved_alone_is_the_same(tmp_path: Path) -> None:
    plain = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors_of("qwen3_5_moe").items()
        if "visual" not in name
    }
    values = values_of("qwen3_5_moe")
    text = values["text_config"] | {"dtype": "float32"}
    assert mapped(text) == mapped(values)
    assert_same_weights("qwen3_5_moe", changed("qwen3_5_moe", tmp_path / "text", plain, text), tmp_path)


def test_only_the_vision_part_is_ignored(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3_5")
    assert any(name.startswith("model.visual.") for name in tensors)
    folder = changed("qwen3_5", tmp_path / "more", tensors | {"model.audio.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"surplus tensor model\.audio\.weight"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "eos", "tied"),
    [
        ({}, (2,), True),
        ({"eos_token_id": 7}, (2,), True),
        ({"tie_word_embeddings": False}, (2,), False),
        ({"text_config": {"eos_token_id": None}, "eos_token_id": [4, 5]}, (4, 5), True),
        ({"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": None}, (2,), True),
    ],
)
def test_what_the_wrapper_says_for_its_text_part(changes: dict[str, Any], eos: tuple[int, ...], tied: bool) -> None:
    values = values_of("qwen3_5")
    text = values["text_config"] | changes.get("text_config", {})
    config = mapped(values | changes | {"text_config": text})
    assert (config.eos_token_ids, config.tie_word_embeddings) == (eos, tied)


@pytest.mark.parametrize("wrong", [{}, [], "x", None, 3])
def test_a_text_part_that_is_none(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"text_config=.*: expected an object"):
        mapped(values_of("qwen3_5", text_config=wrong))


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=false: expected true, attention without positions"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, 'moe_router_activation_func="softmax": expected'),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}, r'mlp_layer_types=\["dense"\]: expected 4 entries'),
        ("kimi_linear", {"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has the layer type 'moe'"),
        ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads=2: expected num_attention_heads=4"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "head_dim=0: expected an integer"),
        ("bailing_hybrid", {"kda_lower_bound": 0}, "kda_lower_bound=0: expected a number below 0"),
        ("bailing_hybrid", {"score_function": "softmax"}, 'score_function="softmax": expected sigmoid'),
        ("bailing_hybrid", {"num_expert_group": 3}, "n_group=3 does not divide the 8 experts"),
        ("bailing_hybrid", {"topk_group": 3}, "topk_group=3 is not in 1..2"),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 4}, "expected layers of linear and of full attention"),
        ("olmo_hybrid", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide linear_num_value_heads=4"),
        ("minimax", {"hidden_act": "gelu"}, 'hidden_act="gelu": expected silu'),
        ("minimax", {"mlp_beta_factor": "1"}, 'mlp_beta_factor="1": expected a finite number'),
        ("minimax", {"sliding_window": 0}, "sliding_window=0: expected an integer"),
        ("qwen3_5_text", {"full_attention_interval": 0, "layer_types": None}, "full_attention_interval=0: expected"),
        ("qwen3_5_moe_text", {"num_experts": 0}, "num_experts=0: expected an integer"),
    ],
)
def test_values_that_are_not_understood(variant: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapped(values_of(variant, **changes))


@pytest.mark.parametrize(
    ("variant", "section"),
    [("qwen3_5", "text_config"), ("qwen3_5_moe", "text_config"), ("kimi_linear.hub", "linear_attn_config")],
)
def test_no_value_of_a_section_makes_anything_but_a_value_error_or_a_model(variant: str, section: str) -> None:
    values = values_of(variant)
    wrong_values = (None, True, "", "x", 0, 1, 3, -1, 7.5, 1e400, 10**30, [], [1], ["x"], [None], {}, {"a": 1})
    refused: list[str] = []
    for key in values[section]:
        for changes in ({key: wrong} for wrong in wrong_values):
            try:
                config = mapped(values | {section: values[section] | changes})
                config.weight_table()
                json.dumps(config.to_dict(), allow_nan=False)
            except ValueError as error:
                refused.append(str(error))
    assert len(refused) > 40
    assert all(len(line.splitlines()) == 1 for line in refused)


def test_kimi_layers_by_the_lists_of_the_hub() -> None:
    lists = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4}
    plain = values_of("kimi_linear")
    hub = without(plain, "layer_types", "linear_head_dim", "linear_num_heads") | {"linear_attn_config": lists}
    assert mapped(hub) == mapped(plain)
    assert mapped(hub | {"linear_attn_config": lists | {"short_conv_kernel_size": 2}}) != mapped(plain)
    for wrong in ([1, 2], [1, 2, 4], [0, 1, 2], [1, 2, 3, 3], [1, 2, 5]):
        with pytest.raises(ValueError, match="expected with kda_layers every layer from 1 to 4 once"):
            mapped(hub | {"linear_attn_config": lists | {"kda_layers": wrong}})


@pytest.mark.parametrize("variant", ["kimi_linear", "bailing_hybrid"])
def test_both_spellings_of_keys(variant: str) -> None:
    values = values_of(variant)
    names = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    assert names.keys() <= values.keys()
    other = {names.get(key, key): value for key, value in values.items()}
    assert mapped(other) == mapped(values)
    assert mapped(other | {"n_group": 1, "norm_topk_prob": False}) != mapped(values)


def test_bailing_head_dim_of_the_hub_and_of_transformers() -> None:
    saved = values_of("bailing_hybrid.plain")
    assert (saved["head_dim"], saved["linear_head_dim"]) == (8, 6)
    hub = without(saved, "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim") | {"head_dim": 6}
    assert mapped(hub) == mapped(saved)
    kda = next(mapped(saved | {"kda_safe_gate": True}).layers[1].branches())
    assert isinstance(kda, KdaConfig)
    assert (kda.head_dim, kda.decay_bound) == (6, -5.0)


def test_bailing_layers_for_multi_token_prediction(tmp_path: Path) -> None:
    extra = {"model.layers.4.attention.dense.weight": torch.zeros(2), "model.layers.4.eh_proj.weight": torch.zeros(2)}
    folder = changed("bailing_hybrid", tmp_path / "mtp", tensors_of("bailing_hybrid") | extra)
    assert_same_weights("bailing_hybrid", folder, tmp_path)
    none = changed(
        "bailing_hybrid",
        tmp_path / "none",
        tensors_of("bailing_hybrid") | extra,
        values_of("bailing_hybrid", num_nextn_predict_layers=0),
    )
    with pytest.raises(ValueError, match=r"surplus tensor model\.layers\.4\."):
        convert(none, tmp_path / "out")


def test_olmo_hybrid_as_on_the_hub(tmp_path: Path) -> None:
    """Convolutions by their heads, norms of attention layers by their own names."""
    tensors = tensors_of("olmo_hybrid")
    packed = tensors_of("olmo_hybrid", "packed")
    for name in [name for name in tensors if "q_conv1d" in name]:
        parts = packed[name.replace("q_conv1d", "conv1d")].split([32, 32, 64])
        tensors |= {name.replace("q_conv1d", f"{x}_conv1d"): part for x, part in zip("qkv", parts, strict=True)}
    norm = tensors.pop("model.layers.3.feedforward_layer_norm.weight")
    tensors["model.layers.3.post_attention_layernorm.weight"] = norm
    assert_same_weights("olmo_hybrid", changed("olmo_hybrid", tmp_path / "hub", tensors), tmp_path)
    tensors |= {name: tensor[1:] for name, tensor in tensors.items() if "v_conv1d" in name}
    with pytest.raises(ValueError, match=r"v_conv1d\.weight has shape \[63, 1, 4\], expected \[64, 1, 4\]"):
        convert(changed("olmo_hybrid", tmp_path / "short", tensors), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, True),
        ({"rope_parameters": None}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": None, "rope_theta": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}, True),
    ],
)
def test_olmo_hybrid_has_positions_if_there_is_a_base(changes: dict[str, Any], positions: bool) -> None:
    config = mapped(values_of("olmo_hybrid", **changes))
    attention = next(config.layers[3].branches())
    assert isinstance(attention, AttentionConfig)
    assert (attention.rope == 0, len(config.ropes) == 1) == (positions, positions)


@pytest.mark.parametrize(("count", "full"), [(2, [1]), (3, [2]), (4, [3]), (9, [3, 7])])
def test_olmo_hybrid_pattern(count: int, full: list[int]) -> None:
    config = mapped(values_of("olmo_hybrid", num_hidden_layers=count, layer_types=None))
    kinds = [next(layer.branches()) for layer in config.layers]
    assert [i for i, kind in enumerate(kinds) if isinstance(kind, AttentionConfig)] == full
    assert {kind.beta_scale for kind in kinds if isinstance(kind, GatedDeltaConfig)} == {2.0}


def test_minimax_decays_are_those_of_its_buffers(tmp_path: Path) -> None:
    buffers = {name: buffer for name, buffer in tiny_model("minimax.alpha").named_buffers() if "slope_rate" in name}
    canonical = weights(tiny_checkpoint("minimax.alpha"), tmp_path / "out")
    layers = [
        i for i, layer in enumerate(mapped(values_of("minimax.alpha")).layers) if "lightning" in layer.mixer_names()
    ]
    assert layers == [0, 2]
    for i in layers:
        rates = canonical[f"layers.{i}.lightning.A_log"].exp()
        torch.testing.assert_close(
            rates, buffers[f"model.layers.{i}.self_attn.slope_rate"].flatten(), rtol=1e-5, atol=0
        )


def test_minimax_does_not_need_its_buffers(tmp_path: Path) -> None:
    named = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    kept = {name: tensor for name, tensor in tensors_of("minimax").items() if not name.endswith(named)}
    assert len(kept) == len(tensors_of("minimax")) - 4
    assert_same_weights("minimax", changed("minimax", tmp_path / "bare", kept), tmp_path)
    stray = kept | {"model.layers.1.self_attn.other_decay": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"surplus tensor model\.layers\.1\.self_attn\.other_decay"):
        convert(changed("minimax", tmp_path / "stray", stray), tmp_path / "out")


def test_minimax_residuals() -> None:
    config = mapped(values_of("minimax.alpha"))
    factors = [
        [(b.skip_multiplier, b.residual_multiplier, b.residual) for b in layer.blocks] for layer in config.layers
    ]
    assert factors[0] == [(0.5, 1.6, "normed"), (0.8, 1.2, "normed")]
    assert factors[1] == [(0.7, 1.3, "normed"), (0.8, 1.2, "normed")]
    linear, full = next(config.layers[0].branches()), next(config.layers[1].branches())
    assert isinstance(linear, LightningConfig)
    assert isinstance(full, AttentionConfig)
    assert (linear.norm_eps, full.window, full.head_dim) == (1e-6, 8, 12)


def test_projections_in_blocks_are_joined_in_their_order(tmp_path: Path) -> None:
    module = tiny_model("qwen3_5_text").model.layers[0].linear_attn
    parts = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    joined = weights(tiny_checkpoint("qwen3_5_text"), tmp_path / "out")["layers.0.gated_delta.in_proj.weight"]
    assert torch.equal(joined, torch.cat([part.weight for part in parts]))


@pytest.mark.parametrize("variant", ["kimi_linear", "kimi_linear.hub", "bailing_hybrid", "olmo_hybrid"])
def test_a_tensor_that_is_missing_is_named_in_the_spelling_of_the_checkpoint(variant: str, tmp_path: Path) -> None:
    for form in ("hub", "packed"):
        tensors = tensors_of(variant, form)
        name = next(name for name in tensors if name.endswith("k_proj.weight") and "layers.2." in name)
        folder = changed(variant, tmp_path / form, without(tensors, name))
        with pytest.raises(ValueError, match="missing tensor " + name.replace(".", r"\.")):
            match_sources(read_model(folder), CheckpointReader(folder))


def test_spellings() -> None:
    a, b, c = Named("a"), Named("b"), Named("c")
    rule = FirstOf((Concat((a, b)), Concat((a, c)), Stack((c, c))))
    assert rule.choose((2,), {"a", "c"}) == Concat((a, c))
    assert rule.choose((2,), {"a", "b", "c"}) == Concat((a, b))
    assert rule.choose((2,), {"b"}) == Concat((a, b))
    assert rule.choose((2,), {"c"}) == Stack((c, c))
    assert rule.choose((2,), set()) == Concat((a, b))
    uneven = FirstOf((Concat((a, b), rows=(1, 3)), Concat((a, b), rows=(2, 2))))
    assert uneven.choose((4,), {"a", "b"}, {"a": (2,), "b": (2,)}.__getitem__) == uneven.alternatives[1]
    assert either({"w": a, "v": FirstOf((a, b))}, {"w": a, "v": c}) == {"w": a, "v": FirstOf((a, b, c))}
    assert renamed(FirstOf((Concat((a, b), rows=(1, 1)), c)), (("a", "x.a"), ("c", "y"))) == FirstOf(
        (Concat((Named("x.a"), b), rows=(1, 1)), Named("y"))
    )
    constant = Constant((0.5, 2.0))
    assert list(constant.tensors((2,))) == []
    assert next(constant.pieces({}.__getitem__)).tolist() == [0.5, 2.0]
