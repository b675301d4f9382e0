"""Token mixers: hyperparameters, canonical weights and caches of each, one file a mixer.

Every mixer has a `kind`, `weights(hidden)` (names relative to `layers.{i}.{kind}.`) and `caches(prefix)`.
"""

from __future__ import annotations

from typing import get_args

from hybridtrt.converters.mixers.attention import AttentionConfig
from hybridtrt.converters.mixers.cca import CcaConfig
from hybridtrt.converters.mixers.gated_delta import GatedDeltaConfig
from hybridtrt.converters.mixers.kda import KdaConfig
from hybridtrt.converters.mixers.length_routed import LengthRoutedConfig
from hybridtrt.converters.mixers.lightning import LightningConfig
from hybridtrt.converters.mixers.low_rank import LowRankConfig
from hybridtrt.converters.mixers.mamba1 import Mamba1Config
from hybridtrt.converters.mixers.mamba2 import Mamba2Config
from hybridtrt.converters.mixers.mla import MlaConfig
from hybridtrt.converters.mixers.rg_lru import RgLruConfig
from hybridtrt.converters.mixers.shared_transformer import SharedTransformerConfig
from hybridtrt.converters.mixers.short_conv import ShortConvConfig

Mixer = (
    AttentionConfig
    | CcaConfig
    | GatedDeltaConfig
    | KdaConfig
    | LengthRoutedConfig
    | LightningConfig
    | LowRankConfig
    | Mamba1Config
    | Mamba2Config
    | MlaConfig
    | RgLruConfig
    | SharedTransformerConfig
    | ShortConvConfig
)
MIXERS: dict[str, type[Mixer]] = {cls.kind: cls for cls in get_args(Mixer)}

__all__ = [
    "MIXERS",
    "AttentionConfig",
    "CcaConfig",
    "GatedDeltaConfig",
    "KdaConfig",
    "LengthRoutedConfig",
    "LightningConfig",
    "LowRankConfig",
    "Mamba1Config",
    "Mamba2Config",
    "Mixer",
    "MlaConfig",
    "RgLruConfig",
    "SharedTransformerConfig",
    "ShortConvConfig",
]
