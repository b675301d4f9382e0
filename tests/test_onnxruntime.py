"""Operators that ONNX has, against onnxruntime: every walker, the kernels in the Triton language among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from test_ops import GATES, WIDTH, one_row

from hybridtrt.plugins.registry import WALKERS, kernel

EVERY = (*WALKERS, "gpu")


def run(node: onnx.NodeProto, feeds: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """A model of one node of opset 27. onnxruntime expands the node to its function, for which it must know shapes."""
    kind = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info(name, kind, x.shape) for name, x in feeds.items()]
    outputs = [onnx.helper.make_tensor_value_info(name, kind, None) for name in node.output]
    graph = onnx.helper.make_graph([node], "g", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 27)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [1, 35])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("rule", GATES)
def test_linear_attention(rule: str, channels: bool, length: int) -> None:
    """One key head a value head, gates already applied, from a state that is not zero."""
    heads, K, V = 2, 4, 5
    gate = (heads, K) if channels else (heads,)
    rng = np.random.default_rng(length)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32)

    q, k, v = normal(length, heads, K), normal(length, heads, K) / 2, normal(length, heads, V)
    a, b = normal(length, *gate), normal(length, heads)
    A_log, dt_bias, past = normal(heads), normal(*gate), normal(1, heads, K, V)
    g = -np.exp(A_log[:, None] if channels else A_log) * np.log1p(np.exp(a + dt_bias))
    feeds = {"query": q, "key": k, "value": v}
    gates, weights = [], {}
    if "gated" in rule:
        feeds["decay"] = g
        gates.append(a)
        weights = {"A_log": torch.from_numpy(A_log), "dt_bias": torch.from_numpy(dt_bias)}
    if "delta" in rule:
        feeds["beta"] = 1 / (1 + np.exp(-b))
        gates.append(b)
    feeds = {name: x.reshape(1, length, -1) for name, x in feeds.items()} | {"past_state": past}
    names = [name if name in feeds else "" for name in ("query", "key", "value", "past_state", "decay", "beta")]
    node = onnx.helper.make_node(
        "LinearAttention", names, ["output", "present_state"],
        q_num_heads=heads, kv_num_heads=heads, scale=0.7, update_rule=rule,
    )  # fmt: skip
    output, present = run(node, feeds)
    for walker in EVERY:
        state = torch.zeros(2, heads, K, V)
        state[1] = torch.from_numpy(past[0])
        operands = [torch.from_numpy(x) for x in (q, k, v, *gates)]
        mine = kernel("linear_attention", walker)(
            one_row(length), *operands, **weights, state=state, rule=rule, scale=0.7
        )
        np.testing.assert_allclose(mine.reshape(1, length, -1).numpy(), output, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state[1].numpy(), present[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 19])
def test_causal_conv(length: int) -> None:
    """From a state that is not zero."""
    rng = np.random.default_rng(length)
    x, past = (rng.standard_normal((1, 3, n)).astype(np.float32) for n in (length, WIDTH - 1))
    weight, bias = rng.standard_normal((3, 1, WIDTH)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    feeds = {"input": x, "weight": weight, "bias": bias, "past_state": past}
    node = onnx.helper.make_node("CausalConvWithState", list(feeds), ["output", "present_state"], activation="silu")
    output, present = run(node, feeds)
    for walker in EVERY:
        state = torch.zeros(2, 3, WIDTH - 1)
        state[1] = torch.from_numpy(past[0])
        mine = kernel("causal_conv", walker)(
            one_row(length), torch.from_numpy(x[0].T.copy()), weight=torch.from_numpy(weight[:, 0]),
            bias=torch.from_numpy(bias), state=state, activation="silu",
        )  # fmt: skip
        np.testing.assert_allclose(mine.numpy().T, output[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[1].numpy(), present[0])
