"""Falcon Mamba: Mamba with RMSNorms without weights on dt, B and C.

Facts from transformers' `FalconMambaConfig` and its modelling code: the epsilon of those norms is a key of its own.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families.mamba import FAMILY as MAMBA
from hybridtrt.converters.families.mamba import read_mamba, read_mixer
from hybridtrt.converters.hf_config import HFConfig


def _config(hf: HFConfig) -> ModelConfig:
    eps = hf.number("mixer_rms_eps", 1e-6, positive=True)
    return read_mamba(hf, "falcon_mamba", replace(read_mixer(hf), dt_bc_norm="plain", dt_bc_norm_eps=eps))


FAMILY = replace(MAMBA, model_types=("falcon_mamba",), config=_config, nestings=())
