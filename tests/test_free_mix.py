"""Models of our own: the list of layers, attention routed by length, keys and values of low rank."""

from __future__ import annotations

import copy
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TINY, random_model, save, tiny_model
from engines import float64_runner, make_engine, oracle_logits, relative_error, tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrt.build.network import build_program
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.describe import describe
from hybridtrt.converters.families.hybridtrt_free_mix import FAMILY
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.memory import PageGroup, PoolLimits, cache_memory, plan_memory
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import load_runner
from hybridtrt.runtime.pages import PagePool
from hybridtrt.runtime.request import Request, SamplingParams

OWN = "hybridtrt_free_mix.own"
PLAIN = {"vocab_size": 96, "hidden_size": 32, "max_position_embeddings": 256}
ATTENTION = {"kind": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ROUTED = {"kind": "length_routed", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "limit": 6}
LOW_RANK = {"kind": "low_rank", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rank": 4}
MLP = {"kind": "mlp", "intermediate": 16}
MOE = {"kind": "moe", "num_experts": 4, "top_k": 2, "intermediate": 8}
WRONG_VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "mlp", "attention", 0, 1, 2, 3, -1, 7.5, 1e400, 10**30, [], [1], ["x"], [None], [{}],
    {}, {"a": 1}, {"kind": "mlp"}, {"kind": []}, {"kind": "attention", "num_heads": 0},
)  # fmt: skip


def mapped(values: dict[str, Any]) -> ModelConfig:
    return FAMILY.config(HFConfig({"model_type": "hybridtrt_free_mix", **values}))


def one_layer(**layer: Any) -> ModelConfig:
    return mapped(PLAIN | {"ropes": [{"dim": 8}], "layers": [layer]})


def test_the_network_of_24_attention_1_linear_attention_and_7_ssm_layers() -> None:
    summary = describe(mapped(TINY["hybridtrt_free_mix"]))
    mixers = Counter(row.mixer for row in summary.layers)
    assert mixers == {"attention": 24, "gated_delta": 1, "mamba1": 3, "mamba2": 4}
    assert Counter(row.ffn for row in summary.layers) == {"mlp": 27, "moe": 5}


def test_groups_and_repeats_are_the_layers_written_out() -> None:
    a, b, c = {"mixer": ATTENTION, "ffn": MLP}, {"mixer": ROUTED}, {"ffn": MOE}
    short = [{"repeat": 2, "layers": [a | {"repeat": 3}, b]}, c | {"repeat": 2}]
    assert mapped(PLAIN | {"layers": short}) == mapped(PLAIN | {"layers": [a, a, a, b, a, a, a, b, c, c]})


def test_absent_fields_take_defaults() -> None:
    config = mapped({"vocab_size": 8, "hidden_size": 4, "layers": [{"mixer": ATTENTION}, {"mixer": LOW_RANK}]})
    assert (config.max_position_embeddings, config.norm_eps, config.ropes) == (2048, 1e-6, ())
    attention, low_rank = (next(layer.branches()) for layer in config.layers)
    assert attention.scale == 8**-0.5
    assert low_rank.positions == 2048


BRANCHES: dict[str, list[dict[str, Any] | None]] = {
    "mixer": [
        None,
        ATTENTION | {"rope": 0},
        ATTENTION | {"window": 5, "num_kv_heads": 1},
        ATTENTION | {"output_gate": True, "qk_norm": "head"},
        ROUTED | {"rope": 0},
        ROUTED | {"limit": 1, "num_kv_heads": 4},
        LOW_RANK,
        LOW_RANK | {"rope": 0, "num_kv_heads": 1},
        {"kind": "gated_delta", "num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 4, "conv_width": 2},
        {"kind": "mamba1", "inner": 16, "d_state": 4, "dt_rank": 3, "conv_width": 4},
        {"kind": "mamba2", "num_heads": 2, "head_dim": 8, "d_state": 4, "n_groups": 1, "conv_width": 4},
    ],
    "ffn": [MLP, MOE, MOE | {"router": {"renormalize": True}, "shared_intermediate": 8, "shared_gate": True}],
}


LAYERS = st.lists(
    st.fixed_dictionaries({**{key: st.sampled_from(BRANCHES[key]) for key in BRANCHES}, "parallel": st.booleans()}),
    min_size=1,
    max_size=4,
)


def mixed(layers: list[dict[str, Any]]) -> Any:
    return random_model("hybridtrt_free_mix", PLAIN | {"ropes": [{"dim": 6}], "layers": layers})


@given(layers=LAYERS, chunk=st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_any_mix_equals_the_plain_definitions(layers: list[dict[str, Any]], chunk: int) -> None:
    """In float64, where nothing but the definitions can differ; logits come back in float32."""
    model = mixed(layers)
    ids = np.random.default_rng(chunk).integers(0, 96, 37).tolist()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(save(model, Path(folder) / "model"))
        runner = float64_runner(engine)
    expected = oracle_logits(model.double(), ids)
    for size in (None, chunk):
        assert relative_error(full_logits(runner, ids, size), expected) < 1e-6


@given(layers=LAYERS, chunk=st.integers(1, 9))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_mixes_in_float32(layers: list[dict[str, Any]], chunk: int) -> None:
    """The same mixes each time: of random ones some round to more, the oracle's own float32 among them."""
    model = mixed(layers)
    ids = np.random.default_rng(chunk).integers(0, 96, 37).tolist()
    with tempfile.TemporaryDirectory() as folder:
        runner = load_runner(make_engine(save(model, Path(folder) / "model")))
    expected = oracle_logits(model, ids)
    for size in (None, chunk):
        assert relative_error(full_logits(runner, ids, size), expected) < 1e-4


@pytest.mark.parametrize("first", [19, 20, 21, 47, 48, 49])
def test_a_chunk_may_end_anywhere_at_the_length_where_attention_changes(first: int) -> None:
    """The limits of the model's two routed layers are 20 and 48."""
    runner = load_runner(tiny_engine(OWN))
    ids = np.random.default_rng(first).integers(0, 96, 70).tolist()
    expected = oracle_logits(tiny_model(OWN), ids)
    assert relative_error(full_logits(runner, ids, first), expected) < 1e-4


def test_requests_on_both_sides_of_the_limit_share_steps() -> None:
    engine = Engine(load_runner(tiny_engine(OWN)))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (3, 17, 46, 60)]
    requests = [Request(str(i), tuple(ids), params) for i, ids in enumerate(prompts)]
    together = engine.generate(requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = engine.generate([request])
        assert alone.token_ids == result.token_ids


def test_pages_end_at_the_limit() -> None:
    config = mapped(TINY[OWN])
    groups = cache_memory(config.caches()).groups
    assert {name: group.limit for name, group in groups.items()} == {"below_20": 20, "below_48": 48, "window_9": None}
    plan = plan_memory(0, cache_memory(config.caches()), PoolLimits(3, 200, max_num_tokens=64, tokens_per_block=16))
    assert (plan.num_pages["below_20"], plan.num_pages["below_48"]) == (1 + 3 * 2, 1 + 3 * 3)
    group, pool = PageGroup("below_20", None, 1, limit=20), PagePool("below_20", 9, 16, limit=20, chunk=64)
    for tokens in (1, 16, 17, 20, 21, 200):
        assert group.pages(tokens, 16, 64) == pool.most_pages(tokens) == (1 if tokens <= 16 else 2)
    caches = [PageSpec("a", "group", (2, 1, 8)), PageSpec("b", "group", (2, 1, 8), limit=4)]
    with pytest.raises(ValueError, match="b: limit=4 in page group group of None"):
        cache_memory(list(caches))


def test_low_rank_caches_do_not_grow_with_the_sequence() -> None:
    caches = cache_memory(one_layer(mixer=LOW_RANK).caches())
    assert caches.groups == {}
    assert caches.state_bytes == 2 * (2 * 4 * 8) * 4  # K and V, 2 heads of rank 4 and 8 channels, float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": None}, r"layers=null: expected a list of one or more objects \(config.json\)"),
        ({"layers": []}, r"layers=\[\]: expected a list of one or more objects"),
        ({"layers": [{}]}, r"mixer and ffn are absent: expected one or both \(config.json, layers\[0\]\)"),
        ({"layers": [{"mixers": {}}]}, r"mixers is not known: expected ffn, mixer, .* \(config.json, layers\[0\]\)"),
        ({"layers": [{"mixer": {"kind": "rwkv"}}]}, "mixer has kind 'rwkv': expected one of attention, "),
        ({"layers": [{"mixer": MLP}]}, "mixer has kind 'mlp': expected one of attention, "),
        ({"layers": [{"mixer": "attention"}]}, 'mixer="attention": expected an object or null'),
        ({"layers": [{"mixer": ATTENTION | {"heads": 3}}]}, "missing or unknown field 'heads' of AttentionConfig"),
        ({"layers": [{"mixer": ATTENTION | {"num_kv_heads": 3}}]}, "num_key_value_heads=3 does not divide"),
        ({"layers": [{"mixer": ATTENTION | {"window": 0}}]}, r"mixer.window=0: expected an integer in 1\.\."),
        ({"layers": [{"mixer": ATTENTION | {"rope": 1}}]}, "layer 0: rope=1 is not one of the model's 0 rotary tables"),
        ({"layers": [{"mixer": ROUTED | {"limit": -3}}]}, r"mixer.limit=-3: expected an integer in 1\.\."),
        ({"layers": [{"mixer": ROUTED | {"num_kv_heads": 3}}]}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"layers": [{"mixer": LOW_RANK | {"rank": "4"}}]}, r"mixer.rank='4': expected int \(.*layers\[0\]"),
        ({"layers": [{"mixer": LOW_RANK | {"positions": 9}}]}, "positions=9: expected max_position_embeddings=256"),
        ({"layers": [{"mixer": LOW_RANK | {"num_kv_heads": 3}}]}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"layers": [{"ffn": MLP | {"activation": "tanhh"}}]}, "activation 'tanhh' is not one of"),
        ({"layers": [{"ffn": MOE | {"top_k": 5}}]}, r"num_experts_per_tok=5 is not in 1\.\.4"),
        ({"layers": [{"ffn": MOE | {"router": {"scoring": "best"}}}]}, "ffn.router.scoring='best': expected"),
        ({"layers": [{"ffn": MOE | {"router_mlp": {"hidden": 0}}}]}, "router_mlp.hidden=0: expected an integer"),
        ({"layers": [{"ffn": MOE | {"router_mlp": {"hidden": 4, "previous_layer": 0}}}]}, "previous_layer=0: expected"),
        ({"layers": [{"ffn": MLP, "repeat": 0}]}, r"repeat=0: expected an integer in 1\.\.4096 \(.*layers"),
        ({"layers": [{"ffn": MLP, "repeat": 4000}] * 2}, "repeat=4000: expected at most 4096 layers in all"),
        ({"layers": [{"layers": [{"layers": [{"ffn": MLP}]}]}]}, r"layers is not known: .*layers\[0\], layers\[0\]"),
        ({"layers": [{"layers": [{"ffn": MLP}], "ffn": MLP}]}, "ffn is not known: expected layers, repeat"),
        ({"hidden_size": None}, "hidden_size=null: expected an integer"),
        ({"max_positions": 9}, "max_positions is not known: expected .*max_position_embeddings"),
        ({"ropes": [{"dim": 3}]}, "3 rotary channels of head_dim=3: expected an even number"),
        ({"ropes": [{"dim": 8, "rope_type": "twisted"}]}, 'rope_type="twisted": expected'),
        (
            {"ropes": [{"dim": 16}], "layers": [{"mixer": ATTENTION | {"rope": 0}}]},
            r"mixer.rope=0 turns 16 channels of head_dim=8 \(config.json, layers\[0\]\)",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapped(PLAIN | {"layers": [{"mixer": ATTENTION}]} | values)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside nested dicts and lists."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths(item, (*path, key))


@pytest.mark.parametrize("key", BRANCHES)
def test_no_value_anywhere_makes_anything_but_a_value_error_or_a_network(key: str) -> None:
    refused = accepted = 0
    routed = [MOE | {"router_mlp": {"hidden": 4}, "skip": True}] if key == "ffn" else []
    for branch in filter(None, BRANCHES[key] + routed):
        group = {"layers": [{key: branch, "parallel": False, "repeat": 1}], "repeat": 2}
        values = PLAIN | {"ropes": [{"dim": 6, "rope_theta": 100.0}], "tie_word_embeddings": True, "layers": [group]}
        for *path, last in paths(values):
            for wrong in (*WRONG_VALUES, ...):
                changed = copy.deepcopy(values)
                parent: Any = changed
                for step in path:
                    parent = parent[step]
                if wrong is ...:
                    del parent[last]
                else:
                    parent[last] = wrong
                try:
                    config = mapped(changed)
                except ValueError:
                    refused += 1
                    continue
                assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
                build_program(config)
                accepted += 1
    assert refused > accepted > 0
