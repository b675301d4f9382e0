"""The memory formula and the layer table against figures computed by hand and against what transformers counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoints import FAMILIES, tiny_checkpoint, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.convert import convert
from hybridtrt.converters.describe import describe, render
from hybridtrt.converters.families import family
from hybridtrt.converters.ffns import MlpConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.memory import GroupPool, PoolLimits, cache_memory, plan_memory, stored_as, weight_bytes
from hybridtrt.converters.mixers import AttentionConfig, GatedDeltaConfig, Mamba1Config, Mamba2Config
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.plugins.caches import PageSpec, pages_held
from hybridtrt.runtime.pages import PagePool

GRANITE_SMALL = {  # ibm-granite/granite-4.0-h-small
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_state": 128,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
}


def published(model_type: str, **values: Any) -> ModelConfig:
    return family(model_type).config(HFConfig({"model_type": model_type, **values}))


def free_mix() -> ModelConfig:
    """Full attention, two layers with a window, gated delta beside a window, and both Mambas."""
    full = AttentionConfig(4, 2, 16, scale=0.25)
    window = AttentionConfig(4, 1, 8, scale=0.25, window=100)
    delta = GatedDeltaConfig(2, 4, 8, 16, conv_width=4)
    mlp = MlpConfig(48)
    branches: list[tuple[Any, ...]] = [
        (full,),
        (window,),
        (Mamba1Config(64, 8, 2, conv_width=4),),
        (Mamba2Config(4, 16, 8, 2, conv_width=4),),
        (window, delta),
    ]
    layers = tuple(LayerConfig((Block(mixers), Block((mlp,)))) for mixers in branches)
    return ModelConfig("free", 96, 32, 1024, 1e-6, layers)


@pytest.mark.parametrize(
    ("config", "parameters", "kv", "state"),
    [
        # 12 of 48 layers: K and V, 2 heads of 256, float32; 36: 32 heads of 128 x 128, 8192 channels of 3 tokens
        (published("qwen3_next"), 79_674_391_296, 12 * 2 * 2 * 256 * 4, 36 * 4 * (32 * 128 * 128 + 8192 * 3)),
        # 4 of 32 layers: K and V, 8 heads of 128; 28: 8192 channels of 16 states and of 3 tokens
        (published("jamba"), 51_570_323_328, 4 * 2 * 8 * 128 * 4, 28 * 4 * 8192 * (16 + 3)),
        # 4 of 40 layers: K and V, 8 heads of 128; 36: 128 heads of 64 x 128, 8192 + 2 * 128 channels of 3 tokens
        (
            published("granitemoehybrid", **GRANITE_SMALL),
            32_207_337_984,
            4 * 2 * 8 * 128 * 4,
            36 * 4 * (128 * 64 * 128 + 8448 * 3),
        ),
    ],
    ids=["Qwen3-Next-80B-A3B", "Jamba-v0.1", "Granite-4.0-H-Small"],
)
def test_published_models(config: ModelConfig, parameters: int, kv: int, state: int) -> None:
    summary = describe(config)
    assert summary.parameters == parameters
    assert summary.kv_bytes_per_token == {"full_attention": kv}
    assert summary.state_bytes == state


def limits(max_batch_size: int, max_seq_len: int, max_num_tokens: int, tokens_per_block: int, spare: int) -> PoolLimits:
    return PoolLimits(max_batch_size, max_seq_len, max_num_tokens, tokens_per_block, spare)


def test_plan_of_a_free_mix_by_hand() -> None:
    config = free_mix()
    plan = plan_memory(weight_bytes(config), cache_memory(config.caches()), limits(3, 1000, 60, 32, spare=2))
    full_pages = 1 + 3 * 32  # 1000 tokens in pages of 32
    window_pages = 1 + 3 * 6  # 99 tokens before 60 touch 6 pages: one token of the first, 30 of the last
    assert plan.num_pages == {"full_attention": full_pages, "window_100": window_pages}
    full_page = 32 * 2 * 2 * 16 * 4
    window_page = 32 * 2 * (2 * 1 * 8 * 4)  # two layers
    assert plan.groups["full_attention"] == GroupPool(None, None, 32, full_pages, full_pages * full_page)
    assert plan.groups["window_100"] == GroupPool(100, None, 6, window_pages, window_pages * window_page)
    assert plan.page_bytes == full_pages * full_page + window_pages * window_page
    mamba1 = 64 * 3 + 64 * 8
    mamba2 = (64 + 2 * 2 * 8) * 3 + 4 * 16 * 8
    delta = (2 * 2 * 8 + 4 * 16) * 3 + 4 * 8 * 16
    assert plan.num_slots == 1 + 3 + 2
    assert plan.state_bytes == 6 * 4 * (mamba1 + mamba2 + delta)
    assert plan.total_bytes == weight_bytes(config) + plan.page_bytes + plan.state_bytes


def test_pages_of_a_window_do_not_grow_with_the_sequence() -> None:
    caches = cache_memory(free_mix().caches())
    short, long = (plan_memory(0, caches, limits(3, length, 60, 32, spare=3)).groups for length in (1000, 1_000_000))
    assert short["window_100"] == long["window_100"]
    assert long["full_attention"].pages_per_sequence == 1_000_000 // 32


def test_a_model_without_states_has_no_slots() -> None:
    plan = plan_memory(0, cache_memory([PageSpec("a", "full", (2,))]), limits(3, 100, 60, 32, spare=3))
    assert (plan.num_slots, plan.state_bytes) == (1, 0)


def test_bytes_follow_from_the_dtypes() -> None:
    config = free_mix()
    kinds = {dtype: cache_memory(stored_as(config.caches(), dtype, "float32")) for dtype in ("float32", "bfloat16")}
    sizes = limits(3, 1000, 60, 32, spare=3)
    single, half = (plan_memory(0, caches, sizes) for caches in kinds.values())
    assert (half.page_bytes, half.state_bytes) == (single.page_bytes / 2, single.state_bytes)
    states = cache_memory(stored_as(config.caches(), "float32", "bfloat16"))
    assert plan_memory(0, states, sizes).state_bytes == single.state_bytes / 2
    assert {spec.dtype for spec in stored_as(config.caches(), "float16", "bfloat16")} == {"float16", "bfloat16"}


@given(
    tokens=st.integers(1, 200),
    page_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 60),
    limit=st.none() | st.integers(1, 300),
    chunk=st.integers(1, 40),
    batch=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_what_fits_the_limits_can_always_run(
    tokens: int, page_size: int, window: int | None, limit: int | None, chunk: int, batch: int, data: st.DataObject
) -> None:
    """The pool of a plan takes a full batch of the longest sequences to their ends, however they are cut."""
    caches = cache_memory([PageSpec("a", "group", (2,), window=window, limit=limit)])
    planned = plan_memory(0, caches, limits(batch, tokens, chunk, page_size, spare=0)).groups["group"]
    pool = PagePool("group", planned.num_pages, page_size, window, limit, chunk)
    assert pool.most_pages(tokens) == planned.pages_per_sequence <= pool.usable
    holdings = [pool.open(str(i), pool.most_pages(tokens)) for i in range(batch)]
    assert pool.available == 0
    done = [0] * batch
    while min(done) < tokens:
        i = data.draw(st.sampled_from([i for i in range(batch) if done[i] < tokens]))
        end = min(tokens, done[i] + data.draw(st.integers(1, chunk)))
        pool.trim(holdings[i], pool.first(done[i]))
        pool.take(holdings[i], pool.end(end) - len(holdings[i].pages))
        done[i] = end
        assert pool.faults(holdings) == []


@given(
    tokens=st.integers(1, 200),
    page_size=st.integers(1, 20),
    window=st.none() | st.integers(1, 60),
    limit=st.none() | st.integers(1, 200),
    chunk=st.integers(1, 40),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_pages_held_is_the_most_of_any_way_to_run_a_sequence(
    tokens: int, page_size: int, window: int | None, limit: int | None, chunk: int, data: st.DataObject
) -> None:
    """However it is cut, no step holds more pages; in steps as long as they may be, some step holds as many."""
    most = pages_held(tokens, page_size, window, limit, chunk)

    def held(context: int, count: int) -> int:
        first = 0 if window is None else max(0, context - window + 1)
        return len({p // page_size for p in range(first, context + count) if limit is None or p < limit})

    context = 0
    while context < tokens:
        count = data.draw(st.integers(1, min(chunk, tokens - context)))
        assert held(context, count) <= most
        context += count
    if limit is None:
        fits = min(chunk, tokens)
        some = max(held(context, fits) for context in range(tokens - fits + 1))
        assert some == most or (window is not None and tokens < window + chunk + page_size)
    assert most == pages_held(min(tokens, limit or tokens), page_size, window, None, chunk)


def test_layers_of_one_group_must_keep_the_same_tokens() -> None:
    caches = [PageSpec("a", "group", (2, 1, 8)), PageSpec("b", "group", (2, 1, 8), window=4)]
    with pytest.raises(ValueError, match="b: window=4 in page group group of None"):
        cache_memory(list(caches))


@pytest.mark.parametrize("family_name", FAMILIES)
def test_parameters_and_stored_bytes(family_name: str, tmp_path: Any) -> None:
    config = convert(tiny_checkpoint(family_name), tmp_path / "out", "bfloat16")
    summary = describe(config)
    assert summary.parameters == tiny_model(family_name).num_parameters()
    file = tmp_path / "out" / "rank0.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert summary.weight_bytes == weight_bytes(config) == file.stat().st_size - header
    assert summary.weight_bytes < weight_bytes(read_model_config(tiny_checkpoint(family_name)))


def test_layer_table() -> None:
    summary = describe(free_mix())
    assert [(row.mixer, row.ffn) for row in summary.layers] == [
        ("attention", "mlp"),
        ("attention", "mlp"),
        ("mamba1", "mlp"),
        ("mamba2", "mlp"),
        ("attention+gated_delta", "mlp"),
    ]
    assert [row.kv_bytes_per_token for row in summary.layers] == [256, 64, 0, 0, 64]
    assert summary.kv_bytes_per_token == {"full_attention": 256, "window_100": 128}
    assert sum(row.state_bytes for row in summary.layers) == summary.state_bytes
    assert summary.layer_kinds["attention / mlp"] == 2
    data = summary.to_dict()
    assert json.loads(json.dumps(data)) == data
    text = render(summary)
    assert len(text.splitlines()) == 1 + 5 + 1 + 1 + 5
    cells = [line.split() for line in text.splitlines()]
    for row in summary.layers:
        numbers = [f"{number:,}" for number in (row.parameters, row.kv_bytes_per_token, row.state_bytes)]
        assert [str(row.index), row.mixer, row.ffn, *numbers] in cells
    outside = 2 * 96 * 32 + 32  # embedding, head and final norm
    assert ["embedding,", "final", "norm,", "head", f"{outside:,}"] in cells
    assert summary.parameters == outside + sum(row.parameters for row in summary.layers)
    totals = dict(line.split("  ", 1) for line in text.splitlines()[-5:])
    assert {name: value.strip() for name, value in totals.items()} == {
        "architecture": "free, float32",
        "layers": "5: 2 attention / mlp, 1 mamba1 / mlp, 1 mamba2 / mlp, 1 attention+gated_delta / mlp",
        "parameters": f"{summary.parameters:,} in {4 * summary.parameters:,} bytes",
        "KV bytes per token": "full_attention 256, window_100 128",
        "state bytes/sequence": f"{summary.state_bytes:,}",
    }


@pytest.mark.parametrize("family_name", FAMILIES)
def test_description_survives_json(family_name: str) -> None:
    config = read_model_config(tiny_checkpoint(family_name))
    for one in (config, free_mix()):
        assert ModelConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one
