"""Mistakes in the lowering are found by computing the network: each is made once, at a place that a seed draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from networks import checkpoint, config_of, evaluated, expected, float64_weights, network, worst_error

from hybridtrt.build.tensorrt import network as walk
from hybridtrt.build.tensorrt.layers import Layers
from hybridtrt.build.tensorrt.native import pointwise
from hybridtrt.build.tensorrt.native.operands import Operands
from hybridtrt.build.tensorrt.tensor import Tensor
from hybridtrt.plugins.call import Call

CLOSE = 1e-4  # of the logits' standard deviation


class Mistake(NamedTuple):
    """`wrong(function, *args)` in place of one call of `owner.name`, among those whose arguments fit."""

    variant: str
    owner: Any
    name: str
    wrong: Callable[..., Any]
    fits: Callable[..., bool] = lambda *args: True


def rebound(call: Call, one: str, other: str) -> Call:
    """The call with two operands connected the wrong way round."""
    names = {one: call.operands[_place(call, other)].bound_to, other: call.operands[_place(call, one)].bound_to}
    changed = (replace(item, bound_to=names.get(item.name, item.bound_to)) for item in call.operands)
    return replace(call, operands=tuple(changed))


def _place(call: Call, name: str) -> int:
    return [operand.name for operand in call.operands].index(name)


def crossed(variant: str, op: str, one: str, other: str) -> Mistake:
    return Mistake(
        variant, walk, "call_of", lambda right, *args: rebound(right(*args), one, other), lambda *args: args[1].op == op
    )


def attribute(variant: str, op: str, name: str, change: Callable[[Any], Any]) -> Mistake:
    def wrong(right: Callable[..., Call], *args: Any) -> Call:
        call = right(*args)
        return replace(call, attributes={**call.attributes, name: change(call.attributes[name])})

    def fits(*args: Any) -> bool:
        return args[1].op == op and args[1].attributes.get(name) is not None

    return Mistake(variant, walk, "call_of", wrong, fits)


def layer(
    variant: str, name: str, wrong: Callable[..., Any], fits: Callable[..., bool] = lambda *args: True
) -> Mistake:
    return Mistake(variant, Layers, name, wrong, fits)


def other_table(right: Callable[..., Call], *args: Any) -> Call:
    """The block table of another page group."""
    call, program = right(*args), args[0]
    (other,) = {cache.group for cache in program.caches.values()} - {call.attributes["group"]}
    operands = list(call.operands)
    place = _place(call, "block_tables")
    operands[place] = replace(operands[place], bound_to=f"block_tables.{other}")
    return replace(call, operands=tuple(operands))


def plain_weight(right: Any, self: Operands, role: str, rank: int) -> Any:
    """Ones in place of the weight."""
    weight = right(self, role, rank)
    return self.layers.binary("DIV", weight, weight)


def exchanged(right: Any, self: Operands, role: str, rank: int) -> Any:
    return right(self, {"bias": "weight", "weight": "bias"}[role], rank)


def other_axis(right: Any, self: Layers, x: Tensor, rows: Tensor) -> Tensor:
    layer = self.network.add_gather(x.handle, rows.handle, 1)
    return self.add("gather", layer, (*rows.shape, *x.shape[1:]), x.dtype)


def not_transposed(right: Any, self: Layers, x: Tensor, weight: Tensor) -> Tensor:
    plain = self.trt.MatrixOperation.NONE
    layer = self.network.add_matrix_multiply(x.handle, plain, weight.handle, plain)
    return self.add("matmul", layer, x.shape, x.dtype)


MISTAKES = {
    "matrix not transposed": layer("lfm2", "matmul", not_transposed, lambda s, x, w: w.shape[0] == w.shape[1]),
    "slice begins one early": layer(
        "qwen3_next",
        "slice",
        lambda right, self, x, rows, begin, size: right(self, x, rows, begin - 1, size),
        lambda s, x, rows, begin, size: begin > 0,
    ),
    "sine added, not taken off": layer(
        "qwen3_next",
        "binary",
        lambda right, self, kind, x, y: right(self, "SUM", x, y),
        lambda s, kind, x, y: kind == "SUB",
    ),
    "cosine for sine": layer(
        "gemma3_text", "unary", lambda right, self, kind, x: right(self, "COS", x), lambda s, kind, x: kind == "SIN"
    ),
    "norm upside down": layer(
        "jamba", "binary", lambda right, self, kind, x, y: right(self, kind, y, x), lambda s, kind, x, y: kind == "DIV"
    ),
    "mean over another axis": layer("jamba", "mean", lambda right, self, x, axis: right(self, x, axis - 1)),
    "larger eps": layer(
        "granitemoehybrid",
        "scalar",
        lambda right, self, value, like: right(self, 0.1, like),
        lambda s, value, like: value < 1e-3,
    ),
    "scale dropped": layer("granitemoehybrid", "multiply", lambda right, self, x, by: x, lambda s, x, by: by != 1.0),
    "parts the wrong way round": layer(
        "zamba2", "concat", lambda right, self, *parts: right(self, *parts[::-1]), lambda s, *parts: len(parts) > 1
    ),
    "another axis gathered": layer("jamba", "gather", other_axis),
    "tanh for the sigmoid": layer(
        "qwen3_next",
        "activation",
        lambda right, self, kind, x: right(self, "TANH", x),
        lambda s, kind, x: kind == "SIGMOID",
    ),
    "exact for the tanh GELU": layer(
        "gemma3_text",
        "activation",
        lambda right, self, kind, x: right(self, "GELU_ERF", x),
        lambda s, kind, x: kind == "GELU_TANH",
    ),
    "heads and channels exchanged": layer(
        "lfm2",
        "reshape",
        lambda right, self, x, dims: right(self, x, (0, dims[2], dims[1])),
        lambda s, x, dims: len(set(dims)) == 3,
    ),
    "gate and up exchanged": Mistake(
        "gemma3_text", pointwise, "glu", lambda right, layers, gate, up, kind: right(layers, up, gate, kind)
    ),
    "weight of a norm dropped": Mistake("olmo_hybrid", Operands, "wide_weight", plain_weight),
    "bias for weight": Mistake("zaya", Operands, "wide_weight", exchanged, lambda s, role, rank: "bias" in s.roles),
    "keys for values": crossed("mixtral", "attention", "k", "v"),
    "B for C": crossed("nemotron_h", "ssd", "B", "C"),
    "A_log for D": crossed("mamba2", "ssd", "A_log", "D"),
    "gates exchanged": crossed("qwen3_next", "linear_attention", "gate_1", "gate_2"),
    "slots read and written exchanged": crossed("qwen3_next", "causal_conv", "state_src", "state_dst"),
    "gates of the recurrence exchanged": crossed("recurrent_gemma", "rg_lru", "input_gate", "recurrence_gate"),
    "another block table": Mistake("gemma3_text", walk, "call_of", other_table, lambda *a: a[1].op == "attention"),
    "attention unscaled": attribute("jamba", "attention", "scale", lambda value: 1.0),
    "wider window": attribute("gemma3_text", "attention", "window", lambda value: value + 1),
    "another activation of experts": attribute("mixtral", "experts", "activation", lambda value: "gelu"),
    "experts not renormalised": attribute("qwen3_next", "router", "renormalize", lambda value: not value),
}


def found_out(variant: str) -> bool:
    """Whether the network cannot be built or computed, or gives other logits than the program."""
    config = config_of(variant)
    try:
        built = network(config, "bfloat16")
        found = evaluated(built, config.program(), config.model.vocab_size, float64_weights(variant))
    except (ValueError, RuntimeError, IndexError, AssertionError):
        return True
    return not worst_error(found, expected(config, checkpoint(variant).tensor)) < CLOSE


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_lowering_is_found(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    right = getattr(mistake.owner, mistake.name)
    calls, chosen = 0, -1

    def mutated(*args: Any, **named: Any) -> Any:
        nonlocal calls
        if not mistake.fits(*args, **named):
            return right(*args, **named)
        calls += 1
        return mistake.wrong(right, *args, **named) if calls - 1 == chosen else right(*args, **named)

    monkeypatch.setattr(mistake.owner, mistake.name, mutated)
    network(config_of(mistake.variant), "bfloat16")
    chosen, calls = int(np.random.default_rng(seed).integers(calls)), 0
    assert found_out(mistake.variant), f"call {chosen}"
