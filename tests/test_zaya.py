"""Zaya: what its parts need of the operators, and its config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import tiny_checkpoint, tiny_model
from steps import make_batch, place
from test_families import canonical, mapped, saved_config

from hybridtrt.build.network import build_program
from hybridtrt.converters.ffns import MoeConfig, RouterConfig, RouterMlpConfig
from hybridtrt.converters.mixers import CcaConfig
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import WALKERS, kernel
from hybridtrt.plugins.spec import Load, TensorSpec


def whole_row(length: int) -> Step:
    placement = place([length], 4, np.random.default_rng(0))
    return Step(make_batch([(0, 0, length)], [[0] * length], placement))


@pytest.mark.parametrize("walker", WALKERS)
def test_grouped_convolution_is_that_of_torch(walker: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(7, 6), torch.randn(6, 2, 3), torch.randn(6)
    expected = F.conv1d(F.pad(x.T, (2, 0)), weight, bias, groups=3).T
    step = whole_row(7)
    actual = kernel("causal_conv", walker)(step, x, weight=weight, bias=bias, state=torch.zeros(4, 6, 2))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("walker", WALKERS)
def test_affine_and_mean_of_heads(walker: str) -> None:
    step, x = whole_row(3), torch.randn(3, 2, 4, 5)
    weight, bias = torch.randn(2, 1, 1), torch.randn(2, 4, 5)
    torch.testing.assert_close(kernel("affine", walker)(step, x, weight=weight, bias=bias), (x + bias) * weight)
    torch.testing.assert_close(kernel("affine", walker)(step, x, weight=weight), x * weight)
    torch.testing.assert_close(kernel("mean_heads", walker)(step, x)[:, :, 0], x.sum(2) / 4)


@pytest.mark.parametrize("walker", WALKERS)
def test_numbers_beyond_the_last_expert_stand_for_none(walker: str) -> None:
    torch.manual_seed(0)
    x, up, down = torch.randn(4, 6), torch.randn(2, 8, 6), torch.randn(2, 6, 4)
    weights, chosen = torch.rand(4, 2), torch.tensor([[0, 2], [2, 1], [2, 2], [1, 0]])
    operands = {"up": up, "down": down, "activation": "silu"}
    got = kernel("experts", walker)(whole_row(4), x, weights, chosen, **operands)
    none = weights.masked_fill(chosen == 2, 0.0)
    want = kernel("experts", walker)(whole_row(4), x, none, chosen % 2, **operands)
    torch.testing.assert_close(got, want)
    assert not got[2].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    program = Program(weights={"w": TensorSpec((6, 4, 3)), "v": TensorSpec((5,)), "u": TensorSpec((6, 3, 3))})
    x = program.add_input("x", TensorSpec(("T", 6)))
    with pytest.raises(ValueError, match=r"a \(affine\): weight \(5,\) does not broadcast to a token of \('T', 6\)"):
        program.call("affine", "a", x, weights={"weight": "v"})
    with pytest.raises(ValueError, match=r"b \(mean_heads\): \('T', 6\) is not"):
        program.call("mean_heads", "b", x)
    program.caches = {spec.name: spec for spec in CcaConfig(2, 1, 2, 3, 3).caches("c")}
    caches = {"state": "c.depthwise_state"}
    with pytest.raises(ValueError, match=r"c \(causal_conv\): weight \(6, 4, 3\) does not fit x"):
        program.call("causal_conv", "c", x, weights={"weight": "w"}, caches=caches)
    program.call("causal_conv", "d", x, weights={"weight": "u"}, caches=caches)
    assert program.flops(program.nodes[-1], Load(tokens=5, sequences=1, logits_rows=1)) == 2 * 5 * 6 * 3 * 3


@torch.no_grad()
def test_the_bias_before_the_first_token_is_carried_over() -> None:
    """At zero input the convolutions of transformers give the folded bias at every position, the first one included."""
    module = tiny_model("zaya.biased").model.layers[1].self_attn.qkv_proj
    channels = module.conv_qk_depthwise.weight.shape[0]
    expected = module.conv_qk_grouped(module.conv_qk_depthwise(torch.zeros(1, channels, module.conv_kernel_size + 4)))
    bias = canonical("zaya.biased", "layers.1.cca.headwise.bias")
    torch.testing.assert_close(expected[0], bias[:, None].expand_as(expected[0]))


def test_defaults_and_layers() -> None:
    config = mapped({"model_type": "zaya"})
    assert len(config.layers) == 40
    mixer, moe = config.layers[3].branches()
    assert mixer == CcaConfig(8, 2, 128, depthwise_width=2, headwise_width=2, rope=0)
    assert isinstance(moe, MoeConfig)
    assert (moe.num_experts, moe.num_classes, moe.top_k) == (16, 17, 1)
    assert moe.router_mlp == RouterMlpConfig(256, previous_layer=2)
    (rope,) = config.ropes
    assert rope.inv_freq[:2] == pytest.approx((1.0, 5e6 ** (-2 / 64)))
    config = read_model_config(tiny_checkpoint("zaya.biased"))
    assert [getattr(next(layer.branches()), "window", 0) for layer in config.layers] == [None, 7, None]
    assert [len(rope.inv_freq) for rope in config.ropes] == [2, 4]  # the second names no part: all of it


def test_rope_parameters_as_the_hub_spells_them() -> None:
    nested = {"hybrid": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    hub = nested | {"hybrid_sliding": None, "rope_type": "default"}
    for rope in (None, nested, hub):
        assert mapped({"model_type": "zaya", "rope_parameters": rope}) == mapped({"model_type": "zaya"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, r"num_experts_per_tok=2: expected an integer in 1\.\.1"),
        ({"sliding_window": None}, "sliding_window=null: expected an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": 7}, "1 KV heads of head_dim=7: expected an even product"),
        ({"layer_types": ["hybrid", "full_attention", "hybrid"]}, "layer_types has the layer type 'full_attention'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "expected an object with an object hybrid"),
        ({"rope_parameters": {"hybrid": None}}, "expected an object with an object hybrid"),
        ({"hidden_act": "relu"}, 'hidden_act="relu": expected silu'),
        ({"cca_time0": 0}, "cca_time0=0: expected an integer"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapped(saved_config("zaya.biased") | changes)


def test_a_router_takes_up_the_state_of_an_earlier_one_only() -> None:
    config = mapped(saved_config("zaya"))
    with pytest.raises(ValueError, match=r"no such operand: layers\.0\.moe\.router\.state"):
        build_program(replace(config, layers=config.layers[1:]))
    with pytest.raises(ValueError, match=r"router.bias=True .* expected false with router_mlp"):
        MoeConfig(2, 1, 4, RouterConfig(bias=True), router_mlp=RouterMlpConfig(4))
