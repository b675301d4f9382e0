"""The keys `mamba_*` of a `config.json` that several families spell alike."""

from __future__ import annotations

import math

from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.mixers import Mamba2Config

ANY_LENGTH = 1 << 24  # positions of a model without attention: as long as any engine can be built for


def read_mamba2(hf: HFConfig, inner: int, inner_keys: str) -> Mamba2Config:
    """Mamba-2 with `inner` channels, which come from `inner_keys`; its norm runs over each group.

    Raises `ValueError` for heads that do not make up the channels.
    """
    heads = hf.integer("mamba_n_heads", 128)
    head_dim = inner // heads
    if hf.values.get("mamba_d_head") != "auto":
        head_dim = hf.integer("mamba_d_head", head_dim)
    if heads * head_dim != inner:
        raise ValueError(
            f"mamba_n_heads={heads} times mamba_d_head={head_dim} is not {inner_keys} = {inner} ({hf.source})"
        )
    bias = hf.flag("mamba_proj_bias", False)
    dt_min, dt_max = time_step_limit(hf)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        d_state=hf.integer("mamba_d_state", 256),
        n_groups=hf.integer("mamba_n_groups", 1),
        conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=hf.flag("mamba_conv_bias", True),
        norm_groups=hf.integer("mamba_n_groups", 1),
        in_bias=bias,
        out_bias=bias,
        dt_min=dt_min,
        dt_max=dt_max,
    )


def time_step_limit(hf: HFConfig) -> tuple[float, float | None]:
    """`dt_min` and `dt_max` of Mamba-2; None: no upper limit."""
    low, high = hf.interval("time_step_limit", (0.0, math.inf))
    if low == math.inf or high <= 0:
        raise hf.error("time_step_limit", "a finite lower and a positive upper limit")
    return max(low, 0.0), None if high == math.inf else high  # softplus is never below 0


def dt_rank(hf: HFConfig, name: str, hidden: int) -> int:
    """The rank of dt in Mamba; absent and "auto" mean a sixteenth of the hidden size, rounded up."""
    auto = -(-hidden // 16)
    return auto if hf.values.get(name) == "auto" else hf.integer(name, auto)
