"""Rotary tables of every rope type against transformers' own."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.rope import read_rope

HEAD_DIM = 16
FACTOR = st.floats(1.0, 64.0)
OPTIONAL: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "proportional": {},
    "yarn": {
        "original_max_position_embeddings": st.integers(64, 8192),
        "beta_fast": st.floats(8.0, 64.0),
        "beta_slow": st.floats(0.5, 4.0),
        "attention_factor": st.floats(0.5, 2.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "truncate": st.booleans(),
    },
    "longrope": {"original_max_position_embeddings": st.integers(64, 8192), "attention_factor": st.floats(0.5, 2.0)},
    "llama3": {"original_max_position_embeddings": st.integers(64, 8192)},
}


@pytest.mark.parametrize("kind", OPTIONAL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_type_is_that_of_transformers(kind: str, data: st.DataObject) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": data.draw(st.floats(100.0, 1e7)), "factor": 1.0}
    rope["factor"] = data.draw(FACTOR)
    rope["partial_rotary_factor"] = data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    pairs = int(HEAD_DIM * rope["partial_rotary_factor"]) // 2
    if kind == "llama3":
        rope |= {"low_freq_factor": data.draw(st.floats(0.5, 2.0)), "high_freq_factor": data.draw(st.floats(2.5, 8.0))}
    if kind == "longrope":
        lists = st.lists(st.floats(1.0, 50.0), min_size=pairs, max_size=pairs)
        rope |= {"short_factor": data.draw(lists), "long_factor": data.draw(lists)}
    rope |= {key: data.draw(value) for key, value in OPTIONAL[kind].items() if data.draw(st.booleans(), key)}
    values = {"max_position_embeddings": 16384, "rope_parameters": rope}
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=16384,
        rope_parameters=dict(rope),
    )  # fmt: skip
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs)
    ours = read_rope(HFConfig(values), HEAD_DIM, max_positions=16384)
    torch.testing.assert_close(torch.tensor(ours.inv_freq), frequencies, rtol=1e-5, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor)
    legacy = {"max_position_embeddings": 16384, "rope_theta": rope.pop("rope_theta")}
    legacy["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    legacy["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert read_rope(HFConfig(legacy), HEAD_DIM, max_positions=16384) == ours


def read(rope: Any, **values: Any) -> Any:
    keys = {name: values.pop(name) for name in ("theta", "partial", "layer_type", "absent") if name in values}
    return read_rope(HFConfig({"rope_parameters": rope, **values}), 8, max_positions=128, **keys)


def test_defaults_nesting_and_length() -> None:
    plain = read({"rope_theta": 100.0})
    assert plain.inv_freq == pytest.approx([100.0 ** (-i / 4) for i in range(4)])
    assert read(None, rope_theta=100.0) == read(None, theta=100.0) == read(None, absent={"rope_theta": 100.0}) == plain
    assert read({"type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 100.0}) == plain
    nested = {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    assert read(nested, layer_type="full_attention") == plain
    halved = read(nested, layer_type="sliding_attention", rope_theta=100.0)
    assert halved.inv_freq == pytest.approx([frequency / 2 for frequency in plain.inv_freq])
    assert read({"rope_theta": 100.0}, layer_type="full_attention") == plain
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 100.0}
    assert read(long).max_positions == 128
    rope = read(long, original_max_position_embeddings=32)
    assert (rope.inv_freq, rope.max_positions) == (plain.inv_freq, 32)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    assert ModelConfig("none", 9, 8, 128, 1e-6, layers=(), ropes=(plain,)).max_length == 128
    assert ModelConfig("none", 9, 8, 128, 1e-6, layers=(), ropes=(plain, rope)).max_length == 32
    assert read(long | {"short_mscale": 1.25, "long_mscale": 1.5}).attention_factor == 1.25


YARN = MappingProxyType({"rope_type": "yarn", "factor": 4.0})
LLAMA3 = MappingProxyType({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "ntk"}, 'rope_type="ntk": expected default or dynamic'),
        ({"type": "su"}, 'type="su": expected'),
        ({"rope_type": "linear"}, "factor=absent: expected a value"),
        ({"rope_type": "linear", "factor": 0}, "factor=0: expected a finite number > 0"),
        ({"rope_type": "dynamic", "factor": "2"}, 'factor="2"'),
        ({**YARN, "rope_theta": 1.0}, "rope_theta=1.0: expected a number > 1"),
        ({**YARN, "beta_fast": -1}, "beta_fast=-1"),
        ({**YARN, "truncate": None}, "truncate=null"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": -10 / math.log(4)}, "mscale_all_dim"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0: expected a number above low_freq_factor=1.0"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor=absent"),
        ({"rope_type": "longrope", "short_factor": [1, 1, 1], "long_factor": [1] * 4}, "a list of 4 finite numbers"),
        ({"rope_type": "longrope", "short_factor": [1, 1, 1, 0], "long_factor": [1] * 4}, "short_factor"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0}, "partial_rotary_factor=0.0"),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 1e308}, "partial_rotary_factor=1e\\+308"),
        ({"rope_theta": 5e-324}, "rope_theta=5e-324: expected frequencies in float32"),
        ({"full_attention": {"rope_type": "default"}}, "rope parameters of full_attention: expected those of the"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(rope)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from([*OPTIONAL, "default"]), data=st.data())
def test_any_value_gives_a_table_or_a_value_error(kind: str, data: st.DataObject) -> None:
    names = [
        "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "attention_factor", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor",
        "short_factor", "long_factor", "short_mscale", "type",
    ]  # fmt: skip
    value = st.one_of(
        st.none(), st.booleans(), st.integers(-2, 2**70), st.floats(), st.just("x"), st.just([1.0] * 4), st.just({})
    )
    rope = data.draw(st.dictionaries(st.sampled_from(names), value, max_size=6))
    try:
        table = read({"rope_type": kind, "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4, **rope})
    except ValueError:
        return
    assert all(math.isfinite(frequency) for frequency in (*table.inv_freq, table.attention_factor))
