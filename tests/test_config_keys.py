"""Every family's config mapping, key by key: absent, null and retyped values against the class of transformers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from checkpoints import TINY, model_type
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import WRONG_VALUES, mapped, outcome, saved_config, through_transformers

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families import families

VARIANTS = [name for name in TINY if model_type(name) in families()]
MODEL_TYPES = sorted({model_type(name) for name in VARIANTS if not name.startswith("hybridtrt_")})


def same(values: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Both make the same model, or both are refused."""
    ours, theirs = outcome(values), outcome(expected)
    return ours == theirs or (isinstance(ours, str) and isinstance(theirs, str))


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_absent_keys_take_the_defaults_of_the_transformers_class(name: str) -> None:
    assert same({"model_type": name}, through_transformers({"model_type": name}))
    values = saved_config(name)
    compared = 0
    for key in sorted(set(values) - {"model_type", "text_config"}):  # without a text part we read the top
        rest = {other: value for other, value in values.items() if other != key}
        try:
            expected = through_transformers(rest)
        except Exception:
            continue  # transformers refuses it too, or crashes
        counted_by_pattern = key == "num_hidden_layers" and {"layer_types", "layers_block_type"} & set(rest)
        assert counted_by_pattern or same(rest, expected), (key, outcome(rest), outcome(expected))
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", MODEL_TYPES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_key_is_refused_or_read(name: str, data: st.DataObject) -> None:
    """One key dropped, null or retyped, at the top or in an object: a `ValueError` or a description that is whole."""
    values = copy.deepcopy(saved_config(data.draw(st.sampled_from([v for v in VARIANTS if model_type(v) == name]))))
    nested = [values[key] for key in sorted(values) if isinstance(values[key], dict) and values[key]]
    place = data.draw(st.sampled_from([values, values, *nested]))
    key = data.draw(st.sampled_from(sorted(place)))
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(st.sampled_from(WRONG_VALUES))
    try:
        config = mapped(values | {"model_type": name})
    except ValueError:
        return
    config.weight_table()
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
