"""Every operator: its kernels against its definition, and the definitions against ONNX's where one exists."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from steps import Placement, cut, make_batch, place

from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.plugins.chunked import CHUNK
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.ragged import Step
from hybridtrt.plugins.registry import MODULES, WALKERS, kernel, op_names, op_spec
from hybridtrt.plugins.selective_scan.vectorized import CHUNK as SCAN_CHUNK
from hybridtrt.plugins.spec import Load, TensorSpec
from hybridtrt.plugins.step import StepBatch

PAGE = 4
WIDTH = 4
LENGTHS = st.lists(
    st.sampled_from(
        [1, 2, 3, WIDTH - 1, WIDTH, *range(SCAN_CHUNK - 1, SCAN_CHUNK + 2), *range(CHUNK - 1, CHUNK + 2), 133]
    ),
    min_size=1,
    max_size=5,
)

# A stateful operator: the shape of each input's token, the weights, the caches' shapes a slot or token, attributes.
Case = tuple[str, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, Any]]
GATES = {"linear": 0, "gated": 1, "delta": 1, "gated_delta": 2}


def linear_attention_case(rule: str, key_heads: int = 2, **attributes: Any) -> Case:
    gates = {f"gate_{i}": (4,) for i in range(GATES[rule])}
    weights: dict[str, tuple[int, ...]] = {"A_log": (4,), "dt_bias": (4,)} if "gated" in rule else {}
    return (
        "linear_attention",
        {"q": (key_heads, 8), "k": (key_heads, 8), "v": (4, 6), **gates},
        weights,
        {"state": (4, 8, 6)},
        {"rule": rule, "scale": 0.4, "l2_norm": "delta" in rule, **attributes},
    )


def decay_per_channel(case: Case) -> Case:
    op, inputs, weights, caches, attributes = case
    return op, inputs | {"gate_0": (4, 8)}, weights | {"dt_bias": (4, 8)}, caches, attributes


def decay_constant(case: Case) -> Case:
    op, inputs, _, caches, attributes = case
    return op, {name: inputs[name] for name in inputs if name != "gate_0"}, {"A_log": (4,)}, caches, attributes


def selective_scan_case(groups: int) -> Case:
    return (
        "selective_scan",
        {"x": (6,), "dt": (6,), "B": (groups, 3), "C": (groups, 3)},
        {"A_log": (6, 3), "D": (6,), "dt_bias": (6,)},
        {"state": (6, 3)},
        {},
    )


def ssd_case(groups: int, dt_min: float = 0.0, dt_max: float | None = None) -> Case:
    return (
        "ssd",
        {"x": (4, 6), "dt": (4,), "B": (groups, 8), "C": (groups, 8)},
        {"A_log": (4,), "D": (4,), "dt_bias": (4,)},
        {"state": (4, 6, 8)},
        {"dt_min": dt_min, "dt_max": dt_max},
    )


def attention_case(kv_heads: int, window: int | None, softcap: float | None = None, sinks: bool = False) -> Case:
    return (
        "attention",
        {"q": (4, 8), "k": (kv_heads, 8), "v": (kv_heads, 8)},
        {"sinks": (4,)} if sinks else {},
        {"kv": (2, kv_heads, 8)},
        {"group": "g", "scale": 0.3, "window": window, "softcap": softcap},
    )


def length_routed_cases(kv_heads: int, limit: int) -> dict[str, Case]:
    kv = {"k": (kv_heads, 8), "v": (kv_heads, 8)}
    below = {"group": "g", "scale": 0.3, "limit": limit}
    return {
        f"attention_below_{limit}": ("attention_below", {"q": (4, 8), **kv}, {}, {"kv": (2, kv_heads, 8)}, below),
        f"linear_attention_from_{limit}": (
            "linear_attention_from",
            {"y": (4, 8), "q": (4, 8), **kv},
            {},
            {"state": (kv_heads, 8, 9)},
            {"limit": limit},
        ),
    }


def low_rank_case(kv_heads: int) -> Case:
    return (
        "low_rank_attention",
        {"q": (4, 8), "k": (kv_heads, 8), "v": (kv_heads, 8)},
        {"projection": (150, 5)},
        {"keys": (kv_heads, 8, 5), "values": (kv_heads, 5, 8)},
        {"scale": 0.3},
    )


def mla_case(rope_dim: int, v_dim: int = 5) -> Case:
    return (
        "mla",
        {"q_nope": (3, 6), "q_rope": (3, rope_dim), "latent": (8,), "k_rope": (1, rope_dim)},
        {"up": (3 * (6 + v_dim), 8)},
        {"kv": (8 + rope_dim,)},
        {"group": "g", "scale": 0.3},
    )


STATEFUL: dict[str, Case] = {
    "causal_conv": ("causal_conv", {"x": (5,)}, {"weight": (5, WIDTH), "bias": (5,)}, {"state": (5, WIDTH - 1)},
                    {"activation": "silu"}),
    "causal_conv_grouped": ("causal_conv", {"x": (6,)}, {"weight": (6, 3, WIDTH), "bias": (6,)},
                            {"state": (6, WIDTH - 1)}, {}),
    "causal_conv_plain": ("causal_conv", {"x": (5,)}, {"weight": (5, 2)}, {"state": (5, 1)}, {}),
    "selective_scan": selective_scan_case(1),
    "selective_scan_groups": selective_scan_case(2),
    "rg_lru": ("rg_lru", {"x": (6,)}, {"input_gate": (2, 3, 3), "input_bias": (6,), "recurrence_gate": (2, 3, 3),
                                       "recurrence_bias": (6,), "decay": (6,)}, {"state": (6,)}, {}),
    "ssd": ssd_case(1),
    "ssd_groups_limits": ssd_case(2, 0.1, 0.9),
    **{f"linear_attention_{rule}": linear_attention_case(rule) for rule in GATES},
    "linear_attention_equal_heads": linear_attention_case("gated_delta", key_heads=4),
    "linear_attention_gated_channels": decay_per_channel(linear_attention_case("gated")),
    "linear_attention_delta_channels": decay_per_channel(linear_attention_case("gated_delta", key_heads=4)),
    "linear_attention_bounded": decay_per_channel(linear_attention_case("gated_delta", decay_bound=-5.0)),
    "linear_attention_beta_to_two": linear_attention_case("gated_delta", beta_scale=2.0),
    "linear_attention_constant_decay": decay_constant(linear_attention_case("gated")),
    **length_routed_cases(4, 1),
    **length_routed_cases(2, 5),
    **length_routed_cases(1, CHUNK + 2),
    "low_rank": low_rank_case(4),
    "low_rank_grouped": low_rank_case(2),
    "attention": attention_case(2, None),
    "attention_mqa": attention_case(1, None),
    "mla": mla_case(rope_dim=4),
    "mla_wide": mla_case(rope_dim=6, v_dim=7),
    "attention_window": attention_case(4, 5),
    "attention_sinks": attention_case(2, None, sinks=True),
    "attention_softcap": attention_case(1, 9, softcap=0.7),
    "attention_sinks_softcap": attention_case(2, 3, softcap=2.0, sinks=True),
}  # fmt: skip


Tensors = dict[str, torch.Tensor]
Steps = list[list[tuple[int, int, int]]]


def run(
    case: Case,
    walker: str,
    dtype: torch.dtype,
    data: list[Tensors],
    weights: Tensors,
    steps: Steps,
    placement: Placement,
    change: Callable[[StepBatch, Tensors], StepBatch] = lambda batch, pools: batch,
) -> tuple[list[torch.Tensor], Tensors]:
    """Outputs of each sequence over the given steps, each changed before it runs, and the pools; all that is not taken
    is NaN."""
    op, inputs, _, cache_shapes, attributes = case
    pools = {}
    for name, shape in cache_shapes.items():
        if name == "kv":
            pools[name] = torch.full((placement.num_pages, PAGE, *shape), torch.nan, dtype=dtype)
        else:
            pools[name] = torch.full((placement.num_slots, *shape), torch.nan, dtype=dtype)
            pools[name][placement.slots] = 0
    tokens = [[0] * len(next(iter(d.values()))) for d in data]
    pieces: list[list[torch.Tensor]] = [[] for _ in data]
    function = kernel(op, walker)
    for rows in steps:
        step = Step(change(make_batch(rows, tokens, placement, groups=["g"]), pools))
        operands = [torch.cat([data[s][name][a:b] for s, a, b in rows]).to(dtype) for name in inputs]
        typed = {name: tensor.to(dtype) for name, tensor in weights.items()}
        out = function(step, *operands, **typed, **pools, **attributes)
        for (sequence, _, _), piece in zip(rows, out.split([b - a for _, a, b in rows]), strict=True):
            pieces[sequence].append(piece)
    return [torch.cat(parts) for parts in pieces], pools


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("walker", ["torch", "cpu"])
@settings(max_examples=12, deadline=None)
@given(lengths=LENGTHS, chunk=st.sampled_from([1, 2, 3, 7, CHUNK, 3 * CHUNK]), seed=st.integers(0, 2**32 - 1))
def test_any_cut_of_any_batch_equals_the_definition(
    name: str, walker: str, lengths: list[int], chunk: int, seed: int
) -> None:
    """Random rows, pieces, slots and pages in float32 against one whole piece a sequence in float64."""
    case = STATEFUL[name]
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    data = [{key: torch.randn(n, *shape) for key, shape in case[1].items()} for n in lengths]
    weights = {key: torch.randn(shape) * 0.5 for key, shape in case[2].items()}
    placement = place(lengths, PAGE, rng)
    whole = [[(s, 0, n)] for s, n in enumerate(lengths)]
    want, want_pools = run(case, "reference", torch.float64, data, weights, whole, placement)
    got, got_pools = run(case, walker, torch.float32, data, weights, list(cut(lengths, chunk, rng)), placement)
    for expected, actual in zip(want, got, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-4, atol=2e-4)
    for key, pool in want_pools.items():
        torch.testing.assert_close(got_pools[key].double(), pool, rtol=2e-4, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, case in STATEFUL.items() if "kv" in case[3]])
@pytest.mark.parametrize("walker", WALKERS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 8, 9, 23, 40]), min_size=1, max_size=4),
    chunk=st.sampled_from([1, 2, 3, 9, 40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_pages_that_no_query_sees_are_not_held(
    name: str, walker: str, lengths: list[int], chunk: int, seed: int
) -> None:
    """Pages before the window or from the limit on: page 0 in the table and NaN in the pool, to the same result."""
    case = STATEFUL[name]
    window, limit = (case[4].get(key) for key in ("window", "limit"))
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    data = [{key: torch.randn(n, *shape) for key, shape in case[1].items()} for n in lengths]
    weights = {key: torch.randn(shape) * 0.5 for key, shape in case[2].items()}
    placement = place(lengths, PAGE, rng)
    steps = list(cut(lengths, chunk, rng))

    def give_back(batch: StepBatch, pools: Tensors) -> StepBatch:
        table = batch.block_tables["g"].copy()
        numbers = np.arange(table.shape[1])
        first = 0 * batch.context_lens if window is None else np.maximum(batch.context_lens - window + 1, 0) // PAGE
        end = -(-(batch.context_lens + np.diff(batch.cu_seqlens)) // PAGE)
        end = end if limit is None else np.minimum(end, -(-limit // PAGE))
        gone = (numbers < first[:, None]) | (numbers >= end[:, None])
        pools["kv"][table[gone]] = torch.nan
        table[gone] = 0
        return replace(batch, block_tables={"g": table[:, : max(end)]})

    held, _ = run(case, walker, torch.float32, data, weights, steps, placement)
    given_back, _ = run(case, walker, torch.float32, data, weights, steps, placement, give_back)
    for expected, actual in zip(held, given_back, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, case in STATEFUL.items() if "kv" not in case[3]])
@pytest.mark.parametrize("walker", WALKERS)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, WIDTH - 1, WIDTH, CHUNK + 1]), min_size=1, max_size=5),
    sources=st.lists(st.integers(1, 5), min_size=5, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_read_one_slot_and_write_another(
    name: str, walker: str, lengths: list[int], sources: list[int], seed: int
) -> None:
    """Several may read one slot, which stays as it was: what each writes is what it would write in a copy of it."""
    op, inputs, weight_shapes, cache_shapes, attributes = STATEFUL[name]
    torch.manual_seed(seed)
    weights = {key: torch.randn(shape) * 0.5 for key, shape in weight_shapes.items()}
    before = {key: torch.randn(12, *shape) for key, shape in cache_shapes.items()}
    contexts = np.random.default_rng(seed).integers(0, 9, len(lengths)).tolist()
    read, written = sources[: len(lengths)], list(range(6, 6 + len(lengths)))

    def run_from(slots: list[int]) -> tuple[torch.Tensor, Tensors]:
        """One step of the rows and of a padding row, in place of or beside the slots that they read."""
        pools = {key: pool.clone() for key, pool in before.items()}
        if slots == written:
            for pool in pools.values():
                pool[written] = pool[read]
        batch = StepBatch(
            input_ids=np.zeros(sum(lengths) + 1, np.int32),
            positions=np.array([c + t for c, n in zip([*contexts, 0], [*lengths, 1], strict=True) for t in range(n)]),
            cu_seqlens=np.cumsum([0, *lengths, 1]).astype(np.int32),
            context_lens=np.array([*contexts, 0], np.int32),
            state_src=np.array([*slots, 0], np.int32),
            state_dst=np.array([*written, 0], np.int32),
            logits_indices=np.zeros(0, np.int32),
        )
        return kernel(op, walker)(Step(batch), *operands, **weights, **pools, **attributes), pools

    operands = [torch.randn(sum(lengths) + 1, *shape) for shape in inputs.values()]
    out, pools = run_from(read)
    expected, copied = run_from(written)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for key, pool in pools.items():
        torch.testing.assert_close(pool, copied[key], rtol=0, atol=0)
        torch.testing.assert_close(pool[1:6], before[key][1:6], rtol=0, atol=0)
        torch.testing.assert_close(pool[6 + len(lengths) :], before[key][6 + len(lengths) :], rtol=0, atol=0)
        assert not any(torch.equal(pool[slot], before[key][slot]) for slot in written)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("rule", GATES)
def test_linear_attention_is_that_of_onnx(rule: str, channels: bool) -> None:
    """One key head a value head, gates already applied: ONNX opset 27 `LinearAttention` by onnx's own evaluator."""
    heads, K, V, T = 3, 4, 5, 6
    gate = (heads, K) if channels else (heads,)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((T, heads, d)).astype(np.float32) for d in (K, K, V))
    a, b = (rng.standard_normal((T, *shape)).astype(np.float32) for shape in (gate, (heads,)))
    A_log, dt_bias = (rng.standard_normal(shape).astype(np.float32) for shape in (heads, gate))
    past = rng.standard_normal((1, heads, K, V)).astype(np.float32)
    g = -np.exp(A_log[:, None] if channels else A_log) * np.log1p(np.exp(a + dt_bias))
    beta = 1 / (1 + np.exp(-b))
    feeds = {"query": q, "key": k, "value": v, "decay": g, "beta": beta}
    feeds = {name: x.reshape(1, T, -1) for name, x in feeds.items()} | {"past_state": past}
    used = [
        "query",
        "key",
        "value",
        "past_state",
        "decay" if "gated" in rule else "",
        "beta" if "delta" in rule else "",
    ]
    node = onnx.helper.make_node(
        "LinearAttention", used, ["output", "present_state"],
        q_num_heads=heads, kv_num_heads=heads, scale=0.7, update_rule=rule,
    )  # fmt: skip
    model = ReferenceEvaluator(one_node(node, [name for name in used if name]))
    output, present = model.run(None, {name: feeds[name] for name in used if name})

    gates = [torch.from_numpy(x) for x, there in ((a, "gated" in rule), (b, "delta" in rule)) if there]
    weights = {"A_log": torch.from_numpy(A_log), "dt_bias": torch.from_numpy(dt_bias)} if "gated" in rule else {}
    for walker in WALKERS:
        state = torch.zeros(2, heads, K, V)
        state[1] = torch.from_numpy(past[0])
        mine = kernel("linear_attention", walker)(
            one_row(T), *(torch.from_numpy(x) for x in (q, k, v)), *gates, **weights, state=state, rule=rule, scale=0.7
        )
        np.testing.assert_allclose(mine.reshape(1, T, -1).numpy(), output, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state[1].numpy(), present[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [1e-6, 1.0, 1e3])
def test_decay_of_any_strength_in_each_channel(rate: float) -> None:
    """From none to one that leaves nothing, side by side in the channels of a head: no exponent overflows."""
    torch.manual_seed(0)
    T, heads, K = 3 * CHUNK + 5, 2, 6
    q, k, v = (torch.randn(T, heads, K) for _ in range(3))
    a = torch.randn(T, heads, K).mul(6.0) + torch.tensor([-40.0, -10.0, 0.0, 3.0, 30.0, 60.0])
    weights = {"A_log": torch.full((heads,), rate).log(), "dt_bias": torch.zeros(heads, K)}
    state = torch.zeros(2, heads, K, K)
    exact = {name: weight.double() for name, weight in weights.items()}
    operands = {"rule": "gated_delta", "scale": 1.0, "l2_norm": True}
    b = torch.randn(T, heads)
    doubles = [x.double() for x in (q, k, v, a, b)]
    want = kernel("linear_attention", "reference")(one_row(T), *doubles, **exact, state=state.double(), **operands)
    got = kernel("linear_attention", "cpu")(one_row(T), q, k, v, a, b, **weights, state=state, **operands)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_causal_conv_is_that_of_onnx(length: int) -> None:
    """ONNX opset 27 `CausalConvWithState` by onnx's own evaluator, from a state that is not zero."""
    rng = np.random.default_rng(2)
    x, past = (rng.standard_normal((1, 3, n)).astype(np.float32) for n in (length, WIDTH - 1))
    weight, bias = rng.standard_normal((3, 1, WIDTH)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    names = ["input", "weight", "bias", "past_state"]
    node = onnx.helper.make_node("CausalConvWithState", names, ["output", "present_state"], activation="silu")
    output, present = ReferenceEvaluator(one_node(node, names)).run(
        None, {"input": x, "weight": weight, "bias": bias, "past_state": past}
    )
    for walker in WALKERS:
        state = torch.zeros(2, 3, WIDTH - 1)
        state[1] = torch.from_numpy(past[0])
        mine = kernel("causal_conv", walker)(
            one_row(length), torch.from_numpy(x[0].T.copy()), weight=torch.from_numpy(weight[:, 0]),
            bias=torch.from_numpy(bias), state=state, activation="silu",
        )  # fmt: skip
        np.testing.assert_allclose(mine.numpy().T, output[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[1].numpy(), present[0])


@pytest.mark.parametrize("walker", WALKERS)
def test_rms_norm_is_that_of_onnx(walker: str) -> None:
    """ONNX opset 23 `RMSNormalization` by onnx's own evaluator: plain, without a weight, and group by group."""
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((4, 3, 6)).astype(np.float32), rng.standard_normal((3, 6)).astype(np.float32)
    node = onnx.helper.make_node("RMSNormalization", ["X", "scale"], ["Y"], axis=-1, epsilon=1e-3)
    model = ReferenceEvaluator(one_node(node, ["X", "scale"]))
    norm = partial(kernel("rms_norm", walker), one_row(4), torch.from_numpy(x), eps=1e-3)
    for mine, scale in ((norm(weight=torch.from_numpy(weight[0])), weight[0]), (norm(), np.ones(6, np.float32))):
        np.testing.assert_allclose(mine.numpy(), model.run(None, {"X": x, "scale": scale})[0], rtol=1e-5, atol=1e-5)
    groups = [model.run(None, {"X": x[:, i], "scale": weight[i]})[0] for i in range(3)]
    grouped = norm(weight=torch.from_numpy(weight))
    np.testing.assert_allclose(grouped.numpy(), np.stack(groups, 1), rtol=1e-5, atol=1e-5)
    program = Program(weights={"w": TensorSpec((2, 6))})
    with pytest.raises(ValueError, match=r"weight \(2, 6\) does not norm x \('T', 3, 6\)"):
        program.call(
            "rms_norm", "norm", program.add_input("x", TensorSpec(("T", 3, 6))), weights={"weight": "w"}, eps=1.0
        )


@pytest.mark.parametrize("walker", WALKERS)
def test_concat_joins_what_split_cuts(walker: str) -> None:
    x = torch.randn(4, 7)
    cut_by = "torch" if walker == "cpu" else walker  # in the C++ executor a split is no call
    parts = kernel("split", cut_by)(one_row(4), x, shapes=[[3], [4]])
    assert torch.equal(kernel("concat", walker)(one_row(4), *parts), x)
    program = Program()
    x3, y2 = program.add_input("x", TensorSpec(("T", 5, 3))), program.add_input("y", TensorSpec(("T", 2)))
    assert program.values[program.call("concat", "both", x3, x3)[0]].shape == ("T", 5, 6)
    with pytest.raises(ValueError, match="differ in more than the last dimension"):
        program.call("concat", "wrong", x3, y2)


@pytest.mark.parametrize("walker", WALKERS)
def test_layer_norm_is_that_of_onnx(walker: str) -> None:
    """ONNX `LayerNormalization` over the last axis by onnx's own evaluator."""
    rng = np.random.default_rng(3)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 2, 7), 7, 7))
    names = ["X", "Scale", "B"]
    node = onnx.helper.make_node("LayerNormalization", names, ["Y"], axis=-1, epsilon=1e-3)
    (expected,) = ReferenceEvaluator(one_node(node, names)).run(None, {"X": x, "Scale": weight, "B": bias})
    operands = {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}
    mine = kernel("layer_norm", walker)(one_row(4), torch.from_numpy(x), **operands, eps=1e-3)
    np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("walker", WALKERS)
def test_latent_attention_is_attention_over_decompressed_keys_and_values(walker: str) -> None:
    """Values padded to the width of the keys, by the definition of plain attention."""
    torch.manual_seed(4)
    heads, nope, rotary, v_dim, rank, length = 3, 6, 4, 5, 8, 11
    q_nope, q_rope = torch.randn(length, heads, nope).double(), torch.randn(length, heads, rotary).double()
    latent, k_rope = torch.randn(length, rank).double(), torch.randn(length, 1, rotary).double()
    up = torch.randn(heads * (nope + v_dim), rank).double()
    step = Step(make_batch([(0, 0, length)], [[0] * length], place([length], PAGE, np.random.default_rng(0)), ["g"]))
    pages = step.block_tables["g"].max() + 1
    keys, values = (latent @ up.T).unflatten(1, (heads, -1)).split([nope, v_dim], dim=-1)
    keys = torch.cat([keys, k_rope.expand(-1, heads, -1)], dim=-1)
    values = torch.nn.functional.pad(values, (0, nope + rotary - v_dim))
    kv = torch.full((pages, PAGE, 2, heads, nope + rotary), torch.nan).double()
    expected = kernel("attention", "reference")(
        step, torch.cat([q_nope, q_rope], dim=-1), keys, values, kv=kv, group="g", scale=0.3
    )
    operands = [q_nope, q_rope, latent, k_rope]
    dtype = torch.float32 if walker == "cpu" else torch.float64
    pool = torch.full((pages, PAGE, rank + rotary), torch.nan, dtype=dtype)
    mine = kernel("mla", walker)(step, *operands, up=up, kv=pool, group="g", scale=0.3)
    close = {"rtol": 1e-5, "atol": 1e-5} if walker == "cpu" else {}  # the others by the default of float64
    torch.testing.assert_close(mine, expected[..., :v_dim].to(dtype), **close)


def one_node(node: onnx.NodeProto, inputs: list[str]) -> onnx.ModelProto:
    """A model of a single node with untyped inputs."""
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node], "g", [onnx.helper.make_tensor_value_info(name, kind, None) for name in inputs],
        [onnx.helper.make_tensor_value_info(name, kind, None) for name in node.output],
    )  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 27)])


def one_row(length: int) -> Step:
    """A step of one row at slot 1."""
    placement = place([length], PAGE, np.random.default_rng(0))
    placement.slots = [1]
    return Step(make_batch([(0, 0, length)], [[0] * length], placement))


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 9), num_experts=st.integers(1, 7), seed=st.integers(0, 1000), data=st.data())
def test_experts_and_router(tokens: int, num_experts: int, seed: int, data: st.DataObject) -> None:
    """Grouped experts equal the token-by-token definition; chosen weights are probabilities of the right experts."""
    top_k = data.draw(st.integers(1, num_experts))
    scoring = data.draw(st.sampled_from(["softmax", "softmax_topk"]))
    torch.manual_seed(seed)
    x, logits = torch.randn(tokens, 6), torch.randn(tokens, num_experts)
    gate_up, down = torch.randn(num_experts, 8, 6), torch.randn(num_experts, 6, 4)
    step = one_row(tokens)
    for renormalize in (False, True):
        weights, chosen = kernel("router", "cpu")(step, logits, top_k=top_k, scoring=scoring, renormalize=renormalize)
        probabilities = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
        for t in range(tokens):
            order = sorted(range(num_experts), key=lambda e: -logits[t, e].item())[:top_k]
            assert chosen[t].tolist() == order
            expected = probabilities[t, order]
            if renormalize or scoring == "softmax_topk":
                expected = expected / expected.sum()
            torch.testing.assert_close(weights[t].double(), expected, rtol=1e-5, atol=1e-6)
    operands = {"up": gate_up, "down": down, "activation": "silu"}
    want = kernel("experts", "reference")(
        step, x.double(), weights.double(), chosen, up=gate_up.double(), down=down.double(), activation="silu"
    )
    got = kernel("experts", "cpu")(step, x, weights, chosen, **operands)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("walker", MODULES)
@pytest.mark.parametrize("op", op_names())
def test_kernel_takes_what_the_spec_declares(op: str, walker: str) -> None:
    """Positional step and inputs, then weights, caches and attributes by name, and nothing else."""
    spec = op_spec(op)
    parameters = list(inspect.signature(kernel(op, walker)).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    assert positional[0].name == "step"
    assert len(positional) - 1 == len(spec.inputs) + (0 if variadic else len(spec.optional_inputs))
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert named == {*spec.weights, *spec.optional_weights, *spec.caches, *spec.attributes}


def test_program_refuses_calls_that_do_not_fit() -> None:
    """An unknown operator, a missing operand, a wrong shape: one line that names the node."""
    program = Program(weights={"w": TensorSpec((8, 4))})
    x = program.add_input("x", TensorSpec(("T", 4)))
    assert program.call("linear", "fits", x, weights={"weight": "w"}) == ("fits",)
    assert program.flops(program.nodes[0], Load(tokens=3, sequences=1, logits_rows=1)) == 2 * 3 * 8 * 4
    for op, name, inputs, kwargs, expected in [
        ("lineal", "a", [x], {}, "op 'lineal' is not known"),
        ("linear", "b", [x], {}, "b: op 'linear' takes"),
        ("linear", "c", ["fits"], {"weights": {"weight": "w"}}, r"c \(linear\): weight \(8, 4\) does not take"),
        ("linear", "fits", [x], {"weights": {"weight": "w"}}, "'fits' is defined twice"),
        ("linear", "d", ["y"], {"weights": {"weight": "v"}}, r"d \(linear\): no such operand: y, v"),
        ("attention", "e", [x, x, x], {"caches": {"kv": "none"}}, r"e \(attention\): no such operand: none"),
    ]:
        with pytest.raises(ValueError, match=expected):
            program.call(op, name, *inputs, **kwargs)


def test_cache_bytes() -> None:
    """Bytes of a token and of a slot follow from shape and dtype."""
    assert PageSpec("kv", "g", (2, 3, 8), "bfloat16").bytes_per_token == 96
    assert StateSpec("s", (4, 8, 6)).bytes_per_slot == 768


def test_costs_follow_the_load() -> None:
    """Operations and bytes of a linear, an expert and an embedding node against figures by hand."""
    program = Program(
        weights={
            "table": TensorSpec((100, 4)),
            "router": TensorSpec((8, 4)),
            "gate_up": TensorSpec((8, 6, 4), "bfloat16"),
            "down": TensorSpec((8, 4, 3), "bfloat16"),
        }
    )
    ids = program.add_input("ids", TensorSpec(("T",), "int32"))
    (x,) = program.call("embedding", "embedding", ids, weights={"weight": "table"})
    (logits,) = program.call("linear", "logits", x, weights={"weight": "router"})
    weights, chosen = program.call("router", "routing", logits, top_k=2, scoring="softmax")
    operands = {"up": "gate_up", "down": "down"}
    program.call("experts", "experts", x, weights, chosen, weights=operands, activation="silu")
    embedding, linear, _, experts = program.nodes
    one, many = Load(tokens=1, sequences=1, logits_rows=1), Load(tokens=9, sequences=2, logits_rows=2)
    assert program.flops(linear, many) == 2 * 9 * 4 * 8
    assert program.bytes_moved(linear, many) == 4 * (9 * 4 + 9 * 8 + 8 * 4)
    assert program.bytes_moved(embedding, many) == 4 * (9 + 9 * 4 + 9 * 4)
    expert_bytes = 2 * (6 * 4 + 4 * 3)
    assert program.flops(experts, one) == 2 * 2 * (6 * 4 + 3 * 4)
    assert program.bytes_moved(experts, one) == 4 * 4 + 4 * 2 + 8 * 2 + 4 * 4 + 2 * expert_bytes
    assert program.bytes_moved(experts, many) == 9 * (4 * 4 + 4 * 2 + 8 * 2 + 4 * 4) + 8 * expert_bytes
