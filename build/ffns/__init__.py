"""Feed-forward blocks as operator calls: `[T, hidden]` to `[T, hidden]`, one file a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtrt.build.ffns.mlp import mlp
from hybridtrt.build.ffns.moe import moe
from hybridtrt.build.scope import Scope

FFNS: dict[str, Callable[[Scope, str, Any], str]] = {function.__name__: function for function in (mlp, moe)}
