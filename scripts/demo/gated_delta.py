"""The chunked gated delta rule for training on a CPU: transformers' form, with a cheaper triangular inverse.

Within a chunk the rule is a triangular system (Yang et al., "Gated Delta Networks", 2024). Batched triangular solves
take most of a training step on a CPU; here the inverse of the system is made of matrix products, in the forward pass
by halves, and in the backward pass by the derivative of an inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next

CHUNK = 64
DIRECT = 8  # rows of a system that is inverted by its series; longer series would lose digits


@contextmanager
def fast_gated_delta() -> Iterator[None]:
    """Within it, Qwen3-Next layers without a cache use `gated_delta`."""
    original = modeling_qwen3_next.torch_chunk_gated_delta_rule
    modeling_qwen3_next.torch_chunk_gated_delta_rule = gated_delta
    try:
        yield
    finally:
        modeling_qwen3_next.torch_chunk_gated_delta_rule = original


def gated_delta(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """`query`, `key` `[B, T, Hk, K]`, `value` `[B, T, Hv, V]`, `g` and `beta` `[B, T, Hv]`, from a zero state.

    `T` is a multiple of `CHUNK`. Queries and keys are normalized here. Returns `[B, T, Hv, V]` and no final state.
    """
    batch, length, heads, _size = value.shape
    groups = heads // key.shape[2]
    query, key = (functional.normalize(x, dim=-1, eps=1e-3).repeat_interleave(groups, 2) for x in (query, key))
    shape = (batch, length // CHUNK, CHUNK, heads)
    query, key, value = (x.reshape(*shape, -1).transpose(2, 3) for x in (query, key, value))  # [B, N, H, C, ...]
    g, beta = (x.reshape(shape).transpose(2, 3).contiguous() for x in (g, beta))
    total = g.cumsum(-1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # [B, N, H, C, C]
    decayed, rest = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    scaled = query * key.shape[-1] ** -0.5
    k_beta = key * beta.unsqueeze(-1)
    inverse = UnitInverse.apply((k_beta @ key.transpose(-1, -2)) * decay)
    solved = inverse @ torch.cat((value * beta.unsqueeze(-1), k_beta * decayed), -1)
    new_values, read_keys = solved.split((value.shape[-1], key.shape[-1]), -1)
    within = (scaled @ key.transpose(-1, -2)) * decay
    reading, writing = scaled * decayed, (key * rest).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]
    outputs = []
    state = value.new_zeros(batch, heads, key.shape[-1], value.shape[-1])
    for i in range(shape[1]):
        new = new_values[:, i] - read_keys[:, i] @ state
        outputs.append(reading[:, i] @ state + within[:, i] @ new)
        state = state * kept[:, i] + writing[:, i] @ new
    return torch.stack(outputs, 1).transpose(2, 3).reshape(batch, length, heads, -1), None


class UnitInverse(torch.autograd.Function):
    """The inverse of the unit lower triangular matrices whose part below the diagonal is that of the argument."""

    @staticmethod
    def forward(context: Any, system: Tensor) -> Tensor:  # [..., C, C]
        inverse = _inverse(system.tril(-1))
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = context.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _inverse(lower: Tensor) -> Tensor:
    """`(I + lower)^-1` of strictly lower triangular matrices: halves are inverted together, then joined."""
    size = lower.shape[-1]
    if size <= DIRECT:
        eye = torch.eye(size)
        inverse, power = eye - lower, lower @ lower
        for _ in range((size - 1).bit_length() - 1):
            inverse, power = inverse + inverse @ power, power @ power
        return inverse
    half = size // 2
    diagonal = torch.stack((lower[..., :half, :half], lower[..., half:, half:]))
    first, second = _inverse(diagonal)
    below = -second @ lower[..., half:, :half] @ first
    upper = torch.cat((first, torch.zeros_like(first)), -1)
    return torch.cat((upper, torch.cat((below, second), -1)), -2)
