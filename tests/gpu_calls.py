"""Calls at the shapes of published models, for which kernels are compiled, and what each kernel may take.

`BUDGETS` is the gate: bytes of stack a thread (spilled registers), and whether tensor cores are meant to be used. A
kernel that is not in it fails the test. Shared memory has the limits of the GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridtrt.plugins.call import STEP_SHAPES, Call, Operand
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import Shape, TensorSpec

PRECISE = ("A_log", "D", "dt_bias", "sinks", "decay", "selection_bias")  # weights that stay float32
PAGE = 32


@dataclass(frozen=True)
class Budget:
    """`stack` in bytes a thread; `matrix`: a matrix instruction must be there when activations have 16 bits.

    In float32 each operand of a product takes three times the registers, so `float32_stack` may be more.
    """

    stack: int = 0
    float32_stack: int = 0
    matrix: bool = False


def call(
    op: str,
    inputs: Mapping[str, Shape],
    weights: Mapping[str, tuple[int, ...]],
    caches: Mapping[str, tuple[int, ...]],
    attributes: Mapping[str, Any],
    dtype: str = "bfloat16",
    float32: tuple[str, ...] = (),
    dtypes: Mapping[str, str] | None = None,
    optional: tuple[str, ...] = (),
) -> Call:
    """A call by the shapes of a token of each input, of the weights, and of a slot or of a page's token of each cache.

    Everything is in `dtype` but states, the weights that models keep precise, and what `float32` and `dtypes` name.
    `optional` names arrays of the step that the operator can do without.
    """
    special = {"experts": "int64", **(dtypes or {})}
    spec = op_spec(op)
    precise = (*PRECISE, *float32)

    def typed(name: str, shape: Shape) -> TensorSpec:
        return TensorSpec(shape, special.get(name, "float32" if name in precise else dtype))

    values = {name: typed(name, ("T", *shape)) for name, shape in inputs.items()}
    kept = {name: typed(name, shape) for name, shape in weights.items()}
    operands = [Operand(name, "input", value, name) for name, value in values.items()]
    operands += [Operand(name, "weight", weight, name) for name, weight in kept.items()]
    for name, shape in caches.items():
        paged = name == "kv"
        pool = TensorSpec(("pages", PAGE, *shape) if paged else ("slots", *shape), dtype if paged else "float32")
        operands.append(Operand(name, "cache", pool, name))
    step = (*spec.step_inputs, *optional)
    operands += [Operand(name, "step", TensorSpec(STEP_SHAPES[name], "int32"), name) for name in step]
    results = tuple(spec.infer(list(values.values()), kept, attributes))
    return Call(op, op, tuple(operands), results, attributes)


def conv(channels: int, width: int, **options: Any) -> Call:
    return call(
        "causal_conv",
        {"x": (channels,)},
        {"weight": (channels, width), "bias": (channels,)},
        {"state": (channels, width - 1)},
        {"activation": "silu"},
        float32=("weight", "bias"),
        **options,
    )


def ssd(heads: int, head_dim: int, groups: int, size: int, **options: Any) -> Call:
    return call(
        "ssd",
        {"x": (heads, head_dim), "dt": (heads,), "b": (groups, size), "c": (groups, size)},
        dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        {"state": (heads, head_dim, size)},
        {"dt_min": 0.0, "dt_max": None},
        **options,
    )


def linear(key_heads: int, heads: int, dim: int, value_dim: int, rule: str, **options: Any) -> Call:
    """Linear attention. `decay` is "head" or "channel" where it depends on the token, else None."""
    decay: str | None = options.pop("decay", "head" if "gated" in rule else None)
    gate = {"head": (heads,), "channel": (heads, dim), None: ()}[decay]
    gates = ([gate] if gate else []) + ([(heads,)] if "delta" in rule else [])
    weights = {"A_log": (heads,)} if "gated" in rule else {}
    return call(
        "linear_attention",
        {
            "q": (key_heads, dim),
            "k": (key_heads, dim),
            "v": (heads, value_dim),
            **{f"gate_{i + 1}": shape for i, shape in enumerate(gates)},
        },
        weights | ({"dt_bias": gate} if gate else {}),
        {"state": (heads, dim, value_dim)},
        {"rule": rule, "scale": dim**-0.5, "l2_norm": "delta" in rule, **options.pop("attributes", {})},
        **options,
    )


def length_routed(heads: int, kv_heads: int, dim: int, **options: Any) -> Call:
    return call(
        "linear_attention_from",
        {"y": (heads, dim), "q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)},
        {},
        {"state": (kv_heads, dim, dim + 1)},
        {"limit": 64},  # both sides of it are met
        **options,
    )


def rg_lru(heads: int, width: int, **options: Any) -> Call:
    gate, channels = (heads, width, width), (heads * width,)
    weights = {"input_gate": gate, "input_bias": channels, "recurrence_gate": gate, "recurrence_bias": channels}
    return call("rg_lru", {"x": channels}, weights | {"decay": channels}, {"state": channels}, {}, **options)


def low_rank(heads: int, kv_heads: int, dim: int, rank: int, **options: Any) -> Call:
    return call(
        "low_rank_attention",
        {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)},
        {"projection": (4096, rank)},
        {"keys": (kv_heads, dim, rank), "values": (kv_heads, rank, dim)},
        {"scale": dim**-0.5},
        **options,
    )


def attention(heads: int, kv_heads: int, head_dim: int, sinks: bool = False, **options: Any) -> Call:
    """`attention`, or `attention_below` where there is a limit."""
    names = ("limit",) if "limit" in options else ("window", "softcap")
    attributes = {name: options.pop(name, None) for name in names}
    return call(
        "attention_below" if "limit" in attributes else "attention",
        {"q": (heads, head_dim), "k": (kv_heads, head_dim), "v": (kv_heads, head_dim)},
        {"sinks": (heads,)} if sinks else {},
        {"kv": (2, kv_heads, head_dim)},
        {"group": "g", "scale": head_dim**-0.5, **attributes},
        **options,
    )


def experts(
    count: int, top_k: int, hidden: int, inner: int, activation: str = "silu", gated: bool = True, bias: bool = False,
    clamp: float | None = None, weights: str | None = None, group: int = 0, **options: Any,
) -> Call:  # fmt: skip
    """`weights`: of matrices that are quantised, int8, int4 or fp8."""
    rows = 2 * inner if gated else inner
    shapes: dict[str, tuple[int, ...]] = {"up": (count, rows, hidden), "down": (count, hidden, inner)}
    if bias:
        shapes |= {"up_bias": (count, rows), "down_bias": (count, hidden)}
    dtypes: dict[str, str] = {}
    for role in ("up", "down") if weights else ():
        _, out, width = shapes[role]
        shapes[role] = (count, out, width // 2 if weights == "int4" else width)
        scales = (width // group,) if group else ()
        shapes[f"{role}_scale"] = (count,) if weights == "fp8" else (count, out, *scales)
        dtypes |= {role: "fp8" if weights == "fp8" else "int8", f"{role}_scale": "bfloat16"}
    inputs = {"x": (hidden,), "weights": (top_k,), "experts": (top_k,)}
    attributes = {"activation": activation, "gated": gated, "clamp": clamp}
    return call("experts", inputs, shapes, {}, attributes, float32=("weights",), dtypes=dtypes, **options)


def router(count: int, top_k: int, scoring: str, bias: bool = False, dtype: str = "float32", **attributes: Any) -> Call:
    weights = {"selection_bias": (count,)} if bias else {}
    return call("router", {"logits": (count,)}, weights, {}, attributes | {"top_k": top_k, "scoring": scoring}, dtype)


def capacity(count: int, top_k: int, ranked: int, overflow: str, factor: float) -> Call:
    attributes = {"top_k": top_k, "num_experts": count, "factor": factor, "overflow": overflow}
    return call("capacity", {"weights": (ranked,), "experts": (ranked,)}, {}, {}, attributes, dtype="float32")


def selective_scan(channels: int, groups: int, size: int, **options: Any) -> Call:
    return call(
        "selective_scan",
        {"x": (channels,), "dt": (channels,), "b": (groups, size), "c": (groups, size)},
        {"A_log": (channels, size), "D": (channels,), "dt_bias": (channels,)},
        {"state": (channels, size)},
        {},
        **options,
    )


def mla(heads: int, nope: int, rope: int, rank: int, v_dim: int, **options: Any) -> Call:
    return call(
        "mla",
        {"q_nope": (heads, nope), "q_rope": (heads, rope), "latent": (rank,), "k_rope": (1, rope)},
        {"up": (heads * (nope + v_dim), rank)},
        {"kv": (rank + rope,)},
        {"group": "g", "scale": (nope + rope) ** -0.5},
        **options,
    )


CALLS: dict[str, Call] = {
    "conv_qwen3_next": conv(8192, 4),
    "conv_nemotron_h": conv(6144, 4),
    "conv_float32": conv(512, 3, dtype="float32"),
    "conv_grouped": call(
        "causal_conv", {"x": (1280,)}, {"weight": (1280, 128, 2)}, {"state": (1280, 1)}, {}, float32=("weight",)
    ),
    "selective_scan_falcon_mamba": selective_scan(8192, 1, 16),
    "selective_scan_zamba": selective_scan(7424, 2, 16, dtype="float16"),
    "selective_scan_ragged": selective_scan(300, 3, 100, dtype="float32"),
    "ssd_nemotron_h": ssd(64, 64, 8, 128),
    "ssd_falcon_h1": ssd(24, 64, 1, 256, dtype="float16"),
    "ssd_float32": ssd(128, 64, 1, 128, dtype="float32"),
    "ssd_zamba2": ssd(80, 64, 2, 64),
    "ssd_ragged": ssd(6, 200, 2, 80),
    "ssd_narrow": ssd(4, 16, 4, 16, dtype="float16"),
    "experts_qwen3_next": experts(512, 10, 2048, 512),
    "experts_nemotron_h": experts(128, 6, 2688, 1856, "relu2", gated=False, dtype="float16"),
    "experts_gpt_oss": experts(128, 4, 2880, 2880, "swiglu_oai", bias=True, clamp=7.0),
    "experts_qwen3_next_int8": experts(512, 10, 2048, 512, weights="int8"),
    "experts_qwen3_next_fp8": experts(512, 10, 2048, 512, weights="fp8"),
    "experts_qwen3_next_int4": experts(512, 10, 2048, 512, weights="int4", group=32),
    "experts_nemotron_h_int8": experts(
        128, 6, 2688, 1856, "relu2", gated=False, dtype="float16", weights="int8", group=64
    ),
    "experts_gpt_oss_int4": experts(
        128, 4, 2880, 2880, "swiglu_oai", bias=True, clamp=7.0, dtype="float16", weights="int4", group=64
    ),
    "experts_deepseek_v2_lite_int4": experts(64, 6, 2048, 1408, weights="int4", group=128),
    "experts_jamba_int8": experts(16, 2, 4096, 14336, weights="int8", group=32),
    "experts_float32": experts(3, 2, 200, 72, "gelu", dtype="float32"),
    "router_qwen3_next": router(512, 10, "softmax", renormalize=True),
    "router_qwen3_next_ranked": router(512, 10, "softmax", renormalize=True, num_ranked=512),
    "router_deepseek_v3": router(
        256, 8, "sigmoid", bias=True, renormalize=True, renormalize_eps=1e-20, scaling=2.5, num_groups=8, top_groups=4
    ),
    "router_gpt_oss": router(128, 4, "softmax_topk", dtype="bfloat16"),
    "router_phimoe": router(16, 2, "sparsemixer", jitter_eps=0.01),
    "linear_qwen3_next": linear(16, 32, 128, 128, "gated_delta"),
    "linear_kimi": linear(32, 32, 128, 128, "gated_delta", decay="channel"),
    "linear_bailing": linear(
        32, 32, 128, 128, "gated_delta", decay="channel", dtype="float16", attributes={"decay_bound": -5.0}
    ),
    "linear_olmo_hybrid": linear(30, 30, 96, 192, "gated_delta", attributes={"beta_scale": 2.0}),
    "linear_minimax": linear(64, 64, 128, 128, "gated", decay=None, dtype="float16"),
    "linear_gla": linear(4, 4, 256, 256, "gated", decay="channel"),
    "linear_delta_256": linear(8, 8, 256, 256, "delta"),
    "linear_float32": linear(16, 32, 128, 128, "gated_delta", dtype="float32"),
    "linear_qwen3_next_drafts": linear(16, 32, 128, 128, "gated_delta", optional=("token_slots",)),
    "linear_kimi_drafts": linear(32, 32, 128, 128, "gated_delta", decay="channel", optional=("token_slots",)),
    "linear_gla_drafts": linear(4, 4, 256, 256, "gated", decay="channel", optional=("token_slots",)),
    "linear_float32_256": linear(4, 4, 256, 256, "gated_delta", decay="channel", dtype="float32"),
    "capacity_qwen3_next": capacity(512, 10, 512, "next_best", 1.25),
    "capacity_gpt_oss": capacity(128, 4, 4, "drop", 1.1),
    "from_64": length_routed(16, 4, 64),
    "from_128": length_routed(32, 8, 128, dtype="float16"),
    "from_256": length_routed(16, 16, 256),
    "from_float32": length_routed(4, 2, 128, dtype="float32"),
    "rg_lru_2b": rg_lru(10, 256, float32=("input_gate", "input_bias", "recurrence_gate", "recurrence_bias")),
    "rg_lru_9b": rg_lru(16, 256, dtype="float16"),
    "rg_lru_float32": rg_lru(3, 40, dtype="float32"),
    "low_rank_64": low_rank(16, 4, 64, 64),
    "low_rank_128": low_rank(32, 8, 128, 128, dtype="float16"),
    "low_rank_256": low_rank(16, 16, 96, 256),
    "low_rank_float32": low_rank(4, 2, 64, 128, dtype="float32"),
    "attention_qwen3_next": attention(16, 2, 256),
    "attention_gpt_oss": attention(64, 8, 64, sinks=True),
    "attention_gpt_oss_window": attention(64, 8, 64, sinks=True, window=128),
    "attention_gemma2": attention(16, 8, 256, window=4096, softcap=50.0, dtype="float16"),
    "attention_llama": attention(32, 8, 128),
    "attention_heads_of_96": attention(32, 32, 96),
    "attention_heads_of_80": attention(32, 1, 80, dtype="float16"),
    "attention_below": attention(32, 8, 128, limit=4096),
    "attention_below_float32": attention(8, 8, 64, limit=256, dtype="float32"),
    "attention_below_float32_wide": attention(8, 2, 128, limit=256, dtype="float32"),
    "attention_below_wide": attention(16, 2, 256, limit=2048, dtype="float16"),
    "mla_deepseek_v3": mla(128, 128, 64, 512, 128),
    "mla_kimi_linear": mla(32, 128, 64, 512, 128, dtype="float16"),
    "mla_deepseek_v2_lite": mla(16, 128, 64, 512, 128),
    "mla_float32": mla(40, 64, 32, 256, 64, dtype="float32"),
    "mla_float32_wide": mla(16, 128, 64, 512, 128, dtype="float32"),
    "attention_float32": attention(28, 4, 128, dtype="float32"),
    "attention_float32_wide": attention(16, 2, 256, dtype="float32"),
}

BUDGETS: dict[str, Budget] = {
    "causal_conv_single": Budget(),
    "causal_conv_tile": Budget(),
    "causal_conv_grouped_tile": Budget(matrix=True),
    "causal_conv_state": Budget(),
    "experts_up_few": Budget(matrix=True),
    "experts_down_few": Budget(matrix=True),
    "experts_count": Budget(),
    "experts_offsets": Budget(),
    "experts_order": Budget(),
    "experts_up": Budget(matrix=True),
    "experts_down": Budget(matrix=True),
    "experts_sum": Budget(),
    "capacity_rows": Budget(),
    "capacity_ask": Budget(),
    "capacity_offsets": Budget(),
    "capacity_order": Budget(),
    "capacity_choose": Budget(),
    "capacity_queue": Budget(),
    "capacity_go_on": Budget(),
    "router_scores": Budget(),
    "router_sparsemixer": Budget(),
    "selective_scan_single": Budget(),
    "selective_scan_chunks": Budget(),
    "ssd_single": Budget(),
    "ssd_scores": Budget(matrix=True),
    "ssd_chunks": Budget(matrix=True),
    "linear_attention_single": Budget(),
    "linear_attention_chunk": Budget(matrix=True),
    "linear_attention_channel_chunk": Budget(matrix=True),
    "linear_attention_channel_solve": Budget(matrix=True),
    "linear_attention_walk": Budget(float32_stack=2048, matrix=True),
    "linear_attention_from_single": Budget(),
    "linear_attention_from_walk": Budget(float32_stack=256, matrix=True),
    "linear_attention_from_divide": Budget(),
    "rg_lru_gates": Budget(matrix=True),
    "rg_lru_walk": Budget(),
    "rg_lru_single": Budget(),
    "low_rank_scores_walk": Budget(float32_stack=256, matrix=True),
    "low_rank_values_walk": Budget(stack=16, float32_stack=768, matrix=True),  # a third block for 16 bytes on sm_80
    "low_rank_scores_single": Budget(),
    "low_rank_values_single": Budget(),
    "attention_store": Budget(),
    "attention_tile": Budget(matrix=True),
    "attention_single": Budget(matrix=True),
    "attention_part": Budget(matrix=True),
    "attention_combine": Budget(),
    "mla_store": Budget(),
    "mla_absorb": Budget(matrix=True),
    "mla_tile": Budget(matrix=True),
    "mla_part": Budget(matrix=True),
    "mla_combine": Budget(),
    "mla_values": Budget(matrix=True),
}
