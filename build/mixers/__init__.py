"""Token mixers as operator calls: `[T, hidden]` to `[T, hidden]`, one file a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtrt.build.mixers.attention import attention
from hybridtrt.build.mixers.cca import cca
from hybridtrt.build.mixers.gated_delta import gated_delta
from hybridtrt.build.mixers.kda import kda
from hybridtrt.build.mixers.length_routed import length_routed
from hybridtrt.build.mixers.lightning import lightning
from hybridtrt.build.mixers.low_rank import low_rank
from hybridtrt.build.mixers.mamba1 import mamba1
from hybridtrt.build.mixers.mamba2 import mamba2
from hybridtrt.build.mixers.mla import mla
from hybridtrt.build.mixers.rg_lru import rg_lru
from hybridtrt.build.mixers.shared_transformer import shared_transformer
from hybridtrt.build.mixers.short_conv import short_conv
from hybridtrt.build.scope import Scope
from hybridtrt.build.shared import Shared

MIXERS: dict[str, Callable[[Scope, str, Any, Shared], str]] = {
    function.__name__: function
    for function in (
        attention,
        cca,
        gated_delta,
        kda,
        length_routed,
        lightning,
        low_rank,
        mamba1,
        mamba2,
        mla,
        rg_lru,
        shared_transformer,
        short_conv,
    )
}
