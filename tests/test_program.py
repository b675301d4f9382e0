"""The flat program: which calls it refuses, what its nodes cost, and how long its values live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import checkpoints
import pytest

from hybridtrt.build.network import build_program
from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.families import family
from hybridtrt.converters.ffns import MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.plugins.pointwise import ACTIVATIONS
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.spec import Load, TensorSpec


def network(variant: str) -> Program:
    return build_program(read_model_config(checkpoints.tiny_checkpoint(variant)))


def small(*ffns: MlpConfig | MoeConfig, **settings: Any) -> ModelConfig:
    """A layer of attention and one block for each ffn."""
    blocks = (Block((AttentionConfig(4, 2, 8, scale=0.3),)), *(Block((ffn,)) for ffn in ffns))
    return ModelConfig("small", 96, 32, 256, 1e-6, (LayerConfig(blocks),), **settings)


@pytest.mark.parametrize("variant", checkpoints.FAMILIES)
def test_every_value_lives_to_its_last_reader(variant: str) -> None:
    """What is dead after a node is read by no later one, is gone as soon as it can be, and only once."""
    program = network(variant)
    last = {value: i for i, node in enumerate(program.nodes) for value in (*node.inputs, *node.outputs)}
    ends = {value: i for i, dead in enumerate(program.dead_after()) for value in dead}
    assert ends == {value: i for value, i in last.items() if value not in program.outputs}
    assert sum(map(len, program.dead_after())) == len(ends)
    assert set(program.values) - set(last) <= set(program.inputs)


def test_only_rows_that_want_logits_reach_the_head() -> None:
    """The cost of final norm and head follows the rows, that of all before it the tokens."""
    program = network("granitemoehybrid")
    assert program.values[program.outputs[0]].shape == ("R", 96)
    one, all_ = (Load(tokens=50, sequences=5, logits_rows=rows, attended=100) for rows in (1, 50))
    names = [node.name for node in program.nodes if program.flops(node, one) != program.flops(node, all_)]
    assert names == ["final_norm", "lm_head", "logits"]
    head = program.nodes[[node.name for node in program.nodes].index("lm_head")]
    assert program.flops(head, one) == 2 * 96 * 32
    assert program.bytes_moved(head, all_) == 4 * (50 * 32 + 50 * 96 + 96 * 32)


def test_weights_that_the_network_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ModelConfig.weight_table
    extra = {"layers.0.mlp.extra": table(small())["embedding.weight"]}
    monkeypatch.setattr(ModelConfig, "weight_table", lambda self: table(self) | extra)
    with pytest.raises(ValueError, match=r"the network does not read these weights: layers\.0\.mlp\.extra"):
        build_program(small(MlpConfig(16)))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_ffns_take_the_activation_of_their_config(kind: str) -> None:
    moe = MoeConfig(4, 2, 16, RouterConfig(), kind, shared_intermediate=24)
    program = build_program(small(MlpConfig(16, kind), moe))
    found = {node.name: node.attributes for node in program.nodes if node.op in ("gated_activation", "experts")}
    assert {
        name: {attributes.get("kind"), attributes.get("activation")} - {None} for name, attributes in found.items()
    } == {
        "layers.0.mlp.act": {kind},
        "layers.0.moe.experts": {kind},
        "layers.0.moe.shared.act": {kind},
    }


def test_matrices_have_the_stored_dtype_and_sensitive_weights_float32() -> None:
    config = small(MlpConfig(16), dtype="bfloat16")
    weights = build_program(config).weights
    assert {name: spec.dtype for name, spec in weights.items()} == {
        name: "float32" if spec.full_precision else "bfloat16" for name, spec in config.weight_table().items()
    }


def test_mixers_take_the_numbers_of_their_config() -> None:
    """Those of which no published model of a supported family has other than the usual values, too."""
    attention = AttentionConfig(4, 2, 8, scale=0.3, window=5, softcap=0.7)
    mamba2 = Mamba2Config(4, 16, 8, 2, conv_width=4, dt_min=0.1, dt_max=0.9, norm_eps=0.25)
    layers = tuple(LayerConfig((Block((mixer,)),)) for mixer in (attention, mamba2))
    program = build_program(ModelConfig("small", 96, 32, 256, 1e-6, layers))
    found = {node.name: node.attributes for node in program.nodes}
    expected = {"group": "window_5", "scale": 0.3, "window": 5, "softcap": 0.7}
    assert expected.items() <= found["layers.0.attention.core"].items()
    assert {"dt_min": 0.1, "dt_max": 0.9}.items() <= found["layers.1.mamba2.core"].items()
    epsilons = {name: attributes["eps"] for name, attributes in found.items() if "eps" in attributes}
    assert epsilons == {
        "layers.0.attention.pre_norm": 1e-6,
        "layers.1.mamba2.pre_norm": 1e-6,
        "layers.1.mamba2.norm": 0.25,
        "final_norm": 1e-6,
    }


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_vectors_are_never_rounded(name: str) -> None:
    """Norms, biases, decays and the like are small, and everything passes through them."""
    values = checkpoints.TINY[name] | checkpoints.SPECIAL_IDS | {"attention_bias": True, "mamba_proj_bias": True}
    table = family(name).config(HFConfig({"model_type": name, **values})).weight_table()
    vectors = {weight: spec.full_precision for weight, spec in table.items() if len(spec.shape) == 1}
    assert vectors == dict.fromkeys(vectors, True)
    assert any(weight.endswith("_proj.bias") or weight.endswith("qkv.bias") for weight in vectors)


Call = tuple[str, list[str], dict[str, str], dict[str, str], dict[str, Any]]
CALLS: dict[str, Call] = {
    "linear": ("linear", ["x"], {"weight": "w"}, {}, {}),
    "conv": ("causal_conv", ["x"], {"weight": "taps"}, {"state": "conv_state"}, {"activation": "silu"}),
    "norm": ("rms_norm", ["x", "x"], {"weight": "n"}, {}, {"eps": 1e-6}),
    "attention": ("attention", ["q", "k", "k"], {}, {"kv": "kv"}, {"group": "g", "scale": 1.0}),
}


def bench() -> Program:
    program = Program(
        weights={"w": TensorSpec((8, 4)), "n": TensorSpec((4,)), "taps": TensorSpec((4, 3))},
        caches={"kv": PageSpec("kv", "g", (2, 2, 4)), "conv_state": StateSpec("conv_state", (4, 2))},
    )
    for name, shape in {"x": (4,), "q": (6, 4), "k": (2, 4)}.items():
        program.add_input(name, TensorSpec(("T", *shape)))
    return program


def without(operands: dict[str, str]) -> dict[str, str]:
    return dict(list(operands.items())[1:])


CHANGES: dict[str, Callable[[Call], Call]] = {
    "an input more": lambda c: (c[0], [*c[1], "x", "x"], *c[2:]),
    "an input less": lambda c: (c[0], c[1][:0], *c[2:]),
    "a weight more": lambda c: (*c[:2], c[2] | {"extra": "w"}, *c[3:]),
    "a weight less": lambda c: (*c[:2], without(c[2]), *c[3:]),
    "a cache more": lambda c: (*c[:3], c[3] | {"extra": "kv"}, c[4]),
    "a cache less": lambda c: (*c[:3], without(c[3]), c[4]),
    "an unknown attribute": lambda c: (*c[:4], c[4] | {"extra": 1}),
}


MISFITS = [
    (name, change)
    for name, call in CALLS.items()
    for change, apply in CHANGES.items()
    if apply(call) != call and (name, change) != ("norm", "a weight less")  # nothing to take away, or it may go without
]


@pytest.mark.parametrize(("name", "change"), MISFITS)
def test_calls_have_the_operands_that_the_operator_declares(name: str, change: str) -> None:
    program = bench()
    op, inputs, weights, caches, attributes = CHANGES[change](CALLS[name])
    with pytest.raises(ValueError, match=f"node: op '{op}' takes inputs"):
        program.call(op, "node", *inputs, weights=weights, caches=caches, **attributes)
    assert program.nodes == []
    op, inputs, weights, caches, attributes = CALLS[name]
    assert program.call(op, "node", *inputs, weights=weights, caches=caches, **attributes) == ("node",)


@pytest.mark.parametrize(
    ("op", "inputs", "operands", "attributes"),
    [
        ("attention", {"q": (6, 4), "k": (2, 8), "v": (2, 8)}, {}, {"group": "g", "scale": 1.0}),
        ("attention", {"q": (6, 4), "k": (4, 4), "v": (4, 4)}, {}, {"group": "g", "scale": 1.0}),
        ("attention", {"q": (6, 4), "k": (2, 4), "v": (3, 4)}, {}, {"group": "g", "scale": 1.0}),
        ("causal_conv", {"x": (5,)}, {"weight": (4, 3)}, {}),
        ("causal_conv", {"x": (4,)}, {"weight": (4, 3)}, {"activation": "gelu"}),
        ("rms_norm", {"x": (4,)}, {"weight": (5,)}, {"eps": 1.0}),
        ("rms_norm", {"x": (4,), "gate": (2, 4)}, {"weight": (4,)}, {"eps": 1.0}),
        ("rotary", {"x": (2, 4), "cos": (2,), "sin": (1,)}, {}, {}),
        ("rotary", {"x": (2, 4), "cos": (3,), "sin": (3,)}, {}, {}),
        ("selective_scan", {"x": (6,), "dt": (5,), "B": (1, 3), "C": (1, 3)}, {"A_log": (6, 3)}, {}),
        ("selective_scan", {"x": (6,), "dt": (6,), "B": (1, 3), "C": (1, 2)}, {"A_log": (6, 3)}, {}),
        ("selective_scan", {"x": (6,), "dt": (6,), "B": (1, 3), "C": (1, 3)}, {"A_log": (6, 2)}, {}),
        ("ssd", {"x": (4, 3), "dt": (3,), "B": (2, 5), "C": (2, 5)}, {}, {}),
        ("ssd", {"x": (4, 3), "dt": (4,), "B": (3, 5), "C": (3, 5)}, {}, {}),
        ("ssd", {"x": (4, 3), "dt": (4,), "B": (2, 5), "C": (1, 5)}, {}, {}),
        ("add", {"x": (4,), "y": (5,)}, {}, {}),
        ("multiply", {"x": (4, 1), "y": (4, 2)}, {}, {}),
        ("split", {"x": (4,)}, {}, {"shapes": [[2], [3]]}),
        ("activation", {"x": (4,)}, {}, {"kind": "softplus"}),
        ("gated_activation", {"x": (5,)}, {}, {"kind": "silu"}),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    op: str, inputs: dict[str, tuple[int, ...]], operands: dict[str, tuple[int, ...]], attributes: dict[str, Any]
) -> None:
    """One line that names node and operator, not a failure of a kernel in some later step."""
    scan = {name: (inputs["x"][0],) for name in ("A_log", "D", "dt_bias") if op in ("ssd", "selective_scan")}
    shapes = scan | operands
    program = Program(
        weights={name: TensorSpec(shape) for name, shape in shapes.items()},
        caches={"kv": PageSpec("kv", "g", (2, 2, 4)), "state": StateSpec("state", (1,))},
    )
    names = [program.add_input(name, TensorSpec(("T", *shape))) for name, shape in inputs.items()]
    cache = {"attention": {"kv": "kv"}}.get(op, {"state": "state"} if scan or op == "causal_conv" else {})
    with pytest.raises(ValueError, match=rf"^node \({op}\): ") as error:
        program.call(op, "node", *names, weights={name: name for name in shapes}, caches=cache, **attributes)
    assert "\n" not in str(error.value)


def test_costs_of_mixers() -> None:
    """Operations and bytes of a step of 9 tokens in 2 sequences that attend 60 keys, against figures by hand."""
    heads, K, V, width = 4, 6, 5, 3
    program = Program(
        weights={
            "taps": TensorSpec((heads * V, width)),
            **{name: TensorSpec((heads,)) for name in ("A_log", "D", "dt_bias")},
            "A_log_1": TensorSpec((heads * V, K)),
            **{name: TensorSpec((heads * V,)) for name in ("D_1", "dt_bias_1")},
        },
        caches={
            "kv": PageSpec("kv", "g", (2, 2, K), "bfloat16"),
            "conv_state": StateSpec("conv_state", (heads * V, width - 1)),
            "state": StateSpec("state", (heads, K, V)),
        },
    )
    shapes = {"q": (heads, K), "k": (2, K), "v": (heads, V), "gate": (heads,), "x": (heads * V,)}
    q, k, v, gate, x = (program.add_input(name, TensorSpec(("T", *shape))) for name, shape in shapes.items())
    b = program.add_input("b", TensorSpec(("T", 1, K)))
    program.call("attention", "attention", q, k, k, caches={"kv": "kv"}, group="g", scale=1.0)
    program.call("causal_conv", "conv", x, weights={"weight": "taps"}, caches={"state": "conv_state"})
    gates = {"weights": {"A_log": "A_log", "dt_bias": "dt_bias"}, "caches": {"state": "state"}, "scale": 1.0}
    program.call("linear_attention", "gated", k, k, v, gate, rule="gated", **gates)
    program.call("linear_attention", "delta", k, k, v, gate, gate, rule="gated_delta", **gates)
    scan = {"A_log": "A_log", "D": "D", "dt_bias": "dt_bias"}
    program.call("ssd", "ssd", v, gate, b, b, weights=scan, caches={"state": "state"})
    scan = {name: f"{name}_1" for name in scan}
    program.call("selective_scan", "scan", x, x, b, b, weights=scan, caches={"state": "state"})
    load = Load(tokens=9, sequences=2, logits_rows=2, attended=60)
    flops = {node.name: program.flops(node, load) for node in program.nodes}
    states = 9 * heads * K * V
    assert flops == {
        "attention": 60 * heads * (2 * K + 2 * K),  # scores, and the sum of the values
        "conv": 9 * heads * V * 2 * width,
        "gated": states * (1 + 2 + 2),  # decay, outer product, read
        "delta": states * (1 + 2 + 2 + 2),  # and what the state predicts
        "ssd": states * (1 + 2 + 2),
        "scan": states * (2 + 1 + 2 + 2),  # its decay differs from state to state
    }
    moved = {node.name: program.bytes_moved(node, load) for node in program.nodes}
    assert moved["attention"] == 4 * 9 * (2 * heads * K + 2 * 2 * K) + (60 + 9) * 2 * 2 * 2 * K
    assert moved["conv"] == 4 * (2 * 9 * heads * V + heads * V * width) + 2 * 2 * 4 * heads * V * (width - 1)
    assert moved["gated"] == 4 * (9 * (2 * 2 * K + 2 * heads * V + heads) + 2 * heads) + 2 * 2 * 4 * heads * K * V
