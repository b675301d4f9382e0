"""Token mixers: hyperparameters, canonical weights and caches of each, one file a mixer.

Every mixer has a `kind`, `weights(hidden)` (names relative to `layers.{i}.{kind}.`) and `caches(prefix)`.
"""

from __future__ import annotations

from typing import get_args

from hybridtrt.converters.mixers.attention import AttentionConfig
from hybridtrt.converters.mixers.gated_delta import GatedDeltaConfig
from hybridtrt.converters.mixers.mamba1 import Mamba1Config
from hybridtrt.converters.mixers.mamba2 import Mamba2Config

Mixer = AttentionConfig | GatedDeltaConfig | Mamba1Config | Mamba2Config
MIXERS: dict[str, type[Mixer]] = {cls.kind: cls for cls in get_args(Mixer)}

__all__ = ["MIXERS", "AttentionConfig", "GatedDeltaConfig", "Mamba1Config", "Mamba2Config", "Mixer"]
