"""Feed-forward blocks: hyperparameters and canonical weights of each (names relative to `layers.{i}.{kind}.`)."""

from __future__ import annotations

from typing import get_args

from hybridtrt.converters.ffns.mlp import MlpConfig
from hybridtrt.converters.ffns.moe import MoeConfig
from hybridtrt.converters.ffns.router import RouterConfig, RouterMlpConfig

Ffn = MlpConfig | MoeConfig
FFNS: dict[str, type[Ffn]] = {cls.kind: cls for cls in get_args(Ffn)}

__all__ = ["FFNS", "Ffn", "MlpConfig", "MoeConfig", "RouterConfig", "RouterMlpConfig"]
