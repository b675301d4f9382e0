"""Attention behind a convolution of queries and keys (compressed convolutional attention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrt.converters.weights import WeightTable, matrix, precise
from hybridtrt.plugins.caches import CacheSpec, PageSpec, StateSpec


@dataclass(frozen=True)
class CcaConfig:
    """Compressed convolutional attention (arXiv 2510.04476).

    q and k pass a depthwise and a headwise convolution, to which their mean within each group of heads is added, and
    are normed to length sqrt(head_dim). Half of the value channels are those of the token before.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    depthwise_width: int
    headwise_width: int
    bias: bool = False  # of the q, k and v projections
    dense_bias: bool = False
    rope: int | None = None  # index into the model's rotary tables; None: no positions
    window: int | None = None  # tokens that can be attended, the current one included

    kind: ClassVar[str] = "cca"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_heads}"
            )
        if self.num_kv_heads * self.head_dim % 2:
            raise ValueError(f"{self.num_kv_heads} KV heads of head_dim={self.head_dim}: expected an even product")

    @property
    def conv_dim(self) -> int:
        """Channels of q and k."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def half_v_dim(self) -> int:
        return self.num_kv_heads * self.head_dim // 2

    def weights(self, hidden: int) -> WeightTable:
        """`qkv` rows are q, k and the current half of v; `delay` takes the other half from the token before.

        The bias of the depthwise convolution is part of `headwise.bias`, so that the states of both start at zero.
        """
        q, half = self.num_heads * self.head_dim, self.half_v_dim
        table = {
            "qkv.weight": matrix(self.conv_dim + half, hidden),
            "v_delayed.weight": matrix(half, hidden),
            "delay.weight": precise(half, 2),
            "depthwise.weight": precise(self.conv_dim, self.depthwise_width),
            "headwise.weight": precise(self.conv_dim, self.head_dim, self.headwise_width),
            "headwise.bias": precise(self.conv_dim),
            "k_scale.weight": precise(self.num_kv_heads, 1, 1),
            "dense.weight": matrix(hidden, q),
        }
        if self.bias:
            table |= {"qkv.bias": precise(self.conv_dim + half), "delay.bias": precise(half)}
        if self.dense_bias:
            table["dense.bias"] = precise(hidden)
        return table

    def caches(self, prefix: str) -> list[CacheSpec]:
        """K and V of one token; the last inputs of both convolutions and of the delay."""
        group = "full_attention" if self.window is None else f"window_{self.window}"
        return [
            PageSpec(f"{prefix}.kv", group, (2, self.num_kv_heads, self.head_dim), window=self.window),
            StateSpec(f"{prefix}.depthwise_state", (self.conv_dim, self.depthwise_width - 1)),
            StateSpec(f"{prefix}.headwise_state", (self.conv_dim, self.headwise_width - 1)),
            StateSpec(f"{prefix}.delay_state", (self.half_v_dim, 1)),
        ]
